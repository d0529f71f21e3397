"""A plain PyTorch training script that joins rounds: python train_network.py agent.toml digits.npz

The lines that make it federated are those with `rt` and `round`.
"""

import sys

import numpy as np
import torch
from network import network
from torch.nn.functional import cross_entropy

import roundtable as rt

with np.load(sys.argv[2]) as file:
    images = torch.from_numpy(file["images"]).float() / 16
    labels = torch.from_numpy(file["labels"]).long()
held_out = torch.arange(len(labels)) % 5 == 0


def evaluate(round):
    """How good the global model is on this silo's held-out images: (sum, count) for each metric."""
    model = network()
    model.load_state_dict(round.weights)
    correct = model(images[held_out]).argmax(1) == labels[held_out]
    return {"accuracy": (correct.sum().item(), len(correct))}


model = network()
inputs, targets = images[~held_out], labels[~held_out]
for round in rt.join(sys.argv[1], task="network", evaluate=evaluate):
    model.load_state_dict(round.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for rows in torch.randperm(len(targets)).split(16):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
    round.submit(model, examples=len(targets), metrics={"loss": loss.item()})
    print(f"round {round.number} of {round.rounds}: loss {loss.item():.3f}")
