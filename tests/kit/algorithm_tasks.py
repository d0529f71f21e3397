"""A task that all algorithms can train, with and without batch normalisation; clients see other classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundtable.core import Site, Task


class Net(nn.Module):
    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.base = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8) if normalised else nn.Identity(), nn.Tanh()
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))  # type: ignore[no-any-return]


class Plain(Task):
    def model(self) -> nn.Module:
        return Net(normalised=False)

    def data(self, site: Site) -> Any:
        chance = torch.Generator().manual_seed(site.index or 0)
        size = 24 + 8 * (site.index or 0)
        labels = torch.randint(0, 2, (size,), generator=chance) + (site.index or 0) % 2
        x = torch.randn(size, 6, generator=chance) + functional.one_hot(labels, 6) * 2.0
        return (x[8:], labels[8:]), (x[:8], labels[:8])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def features(self, model: Any, batch: Any) -> Tensor:
        return model.base(batch[0])  # type: ignore[no-any-return]


class Normalised(Plain):
    def model(self) -> nn.Module:
        return Net(normalised=True)
