"""The task of jobs that are drawn at random: that of `algorithm_tasks`, at silos too, with figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from algorithm_tasks import Net, Plain
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from roundtable import metrics
from roundtable.core import Site


class Toy(Plain):
    """`normalised`: with batch normalisation; `drop`: the rate of dropout; `mapped`: rows in a Dataset."""

    def __init__(self, normalised: bool = False, drop: float = 0.0, mapped: bool = False) -> None:
        self.normalised = normalised
        self.drop = drop
        self.mapped = mapped

    @override
    def model(self) -> nn.Module:
        net = Net(self.normalised)
        if self.drop:
            net.base.append(nn.Dropout(self.drop))
        return net

    @override
    def data(self, site: Site) -> Any:
        """A silo has no number; its name ends in one, as a simulated client's does."""
        train, test = super().data(replace(site, index=int(site.name.rpartition("-")[2])))
        return TensorDataset(*train) if self.mapped else train, test

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, int]]:
        out, labels = model(batch[0]), batch[1]
        said, truth, rows = out.argmax(1) == 1, labels == 1, len(labels)
        return {
            "accuracy": ((out.argmax(1) == labels).sum(), rows),
            "hits": ((said & truth).sum(), rows),
            "said": (said.sum(), rows),
            **metrics.auroc("risk", torch.softmax(out, 1)[:, 1], truth, bins=20),
        }
