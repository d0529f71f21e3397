"""A plain PyTorch training script that joins rounds: python train_starter.py agent.toml [data.npz]

The lines that make it federated are those with `rt` and `round`. `data.npz` holds `values` [n, 8] and
`labels` [n], 0 to 2; without it the rows are made up.
"""

import sys

import numpy as np
import torch
from starter import CLASSES, FEATURES, network
from torch.nn.functional import cross_entropy

import roundtable as rt


def rows():
    """This silo's own rows."""
    if len(sys.argv) > 2:
        with np.load(sys.argv[2], allow_pickle=False) as file:
            return torch.from_numpy(file["values"]).float(), torch.from_numpy(file["labels"]).long()
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (600,))
    return centres[labels] + torch.randn(600, FEATURES), labels


values, labels = rows()
held_out = torch.arange(len(labels)) % 5 == 0


def evaluate(round):
    """How good the global model is on this silo's held-out rows: (sum, count) for each metric."""
    model = network()
    model.load_state_dict(round.weights)
    correct = model(values[held_out]).argmax(1) == labels[held_out]
    return {"accuracy": (correct.sum().item(), len(correct))}


model = network()
inputs, targets = values[~held_out], labels[~held_out]
for round in rt.join(sys.argv[1], task="starter", evaluate=evaluate):
    model.load_state_dict(round.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in torch.randperm(len(targets)).split(32):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
    round.submit(model, examples=len(targets), metrics={"loss": loss.item()})
    print(f"round {round.number} of {round.rounds}: loss {loss.item():.3f}", flush=True)
