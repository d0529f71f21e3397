"""Linear layers that hold several parts in a row (q, k and v), of each of which every rank has its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from typing_extensions import override


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, row after the last) of each part."""
    return list(pairwise([0, *accumulate(sizes)]))


def packed_name(name: str, first: int, after: int) -> str:
    """What a part of a parameter is called: `attention.qkv.weight#0-32`."""
    return f"{name}#{first}-{after}"


def unpacked_name(name: str) -> tuple[str, tuple[int, int] | None]:
    """(the parameter's name, its rows), None for a parameter that is whole."""
    whole, mark, rows = name.partition("#")
    if not mark:
        return name, None
    first, _, after = rows.partition("-")
    return whole, (int(first), int(after))


class PackedLinear(nn.Module):
    """A linear layer whose rows are parts of these sizes, each a parameter of its own over a mesh's ranks.

    What it gives is this rank's share of each part, one after the other: what the whole layer gives, with
    shorter parts.
    """

    def __init__(self, layer: nn.Linear, sizes: Sequence[int], mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._spans = spans(sizes)
        for key, whole in layer.named_parameters(recurse=False):
            for first, after in self._spans:
                part = distribute_tensor(whole.detach()[first:after], mesh, [Shard(0)])
                parameter = nn.Parameter(part, whole.requires_grad)
                self.register_parameter(packed_name(key, first, after), parameter)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → this rank's columns, [..., out / ranks]."""
        whole = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        parts = []
        for first, after in self._spans:
            weight: Any = self._parameters[packed_name("weight", first, after)]
            part: Any = F.linear(whole, weight, self._parameters.get(packed_name("bias", first, after)))
            parts.append(part.redistribute(placements=[Shard(-1)]).to_local())
        return torch.cat(parts, -1)


def pack(model: nn.Module, packed: Mapping[str, Sequence[int]], mesh: DeviceMesh) -> None:
    """Puts packed layers in the place of those that the model has of them."""
    present = dict(model.named_modules())
    for name, sizes in packed.items():
        layer = present.get(name)
        if isinstance(layer, nn.Linear):
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent)._modules[key] = PackedLinear(layer, sizes, mesh)
