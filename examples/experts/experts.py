"""A mixture of experts: tokens choose two of eight small networks, shared out over a cluster's ranks."""

import torch
from torch import nn
from torch.nn import functional as F

import roundtable as rt
from roundtable.cluster.parallel.experts import MixtureOfExperts

LENGTH, VOCABULARY, DIM = 16, 32, 32


class Block(nn.Module):
    """A residual mixture over each token and the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MixtureOfExperts(DIM, 64, experts=8, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, DIM] → the same shape."""
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.moe(self.norm(x + before))


class Experts(rt.Task):
    """Next-token prediction where the step from token to token depends on the token."""

    def model(self) -> nn.Module:
        embed, head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        return nn.Sequential(embed, Block(), Block(), head)

    def data(self, site: rt.Site):
        generator = torch.Generator().manual_seed(site.index)
        tokens = [torch.randint(VOCABULARY, (320,), generator=generator)]
        for _ in range(LENGTH):
            tokens.append((tokens[-1] * 5 + 1) % VOCABULARY)
        rows = torch.stack(tokens, 1)
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return (x[:256], y[:256]), (x[256:], y[256:])

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        balance = [part.balance_loss for part in model.modules() if isinstance(part, MixtureOfExperts)]
        # Small enough to leave the task in charge, large enough that no expert starves.
        return loss + 0.01 * sum(balance)

    def metrics(self, model: nn.Module, batch):
        right = model(batch[0]).argmax(-1) == batch[1]
        return {"accuracy": (right.sum(), right.numel())}

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.005)
