"""Algorithms that average a part of the model; the rest stays with each client.

FedPer (Arivazhagan et al. 2019), LG-FedAvg (Liang et al. 2020) and FedBN (Li et al. 2021) train all of it at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.personal.heads import HeadTable, head_of
from roundtable.core.errors import ConfigError

_SHARED_PART = Composition(levels=WHOLE_UPDATE_LEVELS, own_optimizers=True, schedule=True, buffered=True)


class FedPer(ClientAlgorithm):
    """The head stays; the base is averaged (Algorithms 1 and 2)."""

    Table = HeadTable
    composition = _SHARED_PART

    @override
    def local_tensors(self, model: nn.Module) -> Sequence[str]:
        return head_of(model, self.table)


class LgFedAvg(ClientAlgorithm):
    """The base stays, the head is averaged (Algorithm 1)."""

    Table = HeadTable
    composition = _SHARED_PART

    @override
    def local_tensors(self, model: nn.Module) -> Sequence[str]:
        head = set(head_of(model, self.table))
        frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
        return [name for name in model.state_dict() if name not in head and name not in frozen]


class FedBn(ClientAlgorithm):
    """Batch normalisation stays, with its scale, shift and running statistics (Algorithm 1).

    Layers are found by their type. A client that has never trained evaluates with those of the initial model.
    """

    composition = _SHARED_PART

    @override
    def local_tensors(self, model: nn.Module) -> Sequence[str]:
        kinds = nn.modules.batchnorm._NormBase
        names = [
            f"{place}.{tensor}" if place else tensor
            for place, layer in model.named_modules()
            if isinstance(layer, kinds)
            for tensor in layer.state_dict()
        ]
        if not names:
            raise ConfigError(
                f"algorithm.name = {self.table.name!r}: {type(model).__name__} has no batch "
                "normalisation; without it "
                "this is fedavg"
            )
        return names
