"""Layers of one matrix, whichever way round it lies, and the parts of them that tensor-parallel ranks hold.

A layer may hold several parts in a row (q, k and v), of each of which every rank has its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from typing_extensions import override

# 64 MiB in float64: allocators give that back, and keep what is a little smaller.
_AT_ONCE = 1 << 23
Part = tuple[int, int, int]
"""A part of a tensor: (dimension, first, after the last)."""


def is_transposed(layer: object) -> bool:
    """Whether it is a linear layer whose weight is [in, out]: GPT-2's Conv1D in transformers."""
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ != "Conv1D" or not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    return bool(getattr(layer, "nf", None) == weight.shape[1])


def is_dense(layer: object) -> bool:
    """Whether it multiplies by its weight, of which columns and rows can be split.

    Not where the weight is computed from other parameters (torch's parametrizations): those are no columns.
    """
    owned = isinstance(layer, nn.Module) and isinstance(layer._parameters.get("weight"), nn.Parameter)
    return owned and (isinstance(layer, nn.Linear) or is_transposed(layer))


def output_dimension(layer: nn.Module) -> int:
    """The dimension of the weight that counts what a dense layer, or an embedding, gives."""
    return 1 if is_transposed(layer) or isinstance(layer, nn.Embedding) else 0


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a dense layer or an embedding."""
    return layer.get_parameter("weight")


def outputs_of(layer: nn.Module) -> int:
    """How many numbers a dense layer, or an embedding, gives."""
    return int(weight_of(layer).shape[output_dimension(layer)])


def inputs_of_layer(layer: nn.Module) -> int:
    """How many numbers a dense layer takes."""
    return int(weight_of(layer).shape[1 - output_dimension(layer)])


def take_outputs(layer: nn.Module, places: Sequence[int]) -> None:
    """Leaves a dense layer, or an embedding, these of its outputs."""
    _take(layer, output_dimension(layer), places, ("out_features", "nf", "embedding_dim"))
    if (bias := getattr(layer, "bias", None)) is not None:
        layer.register_parameter("bias", nn.Parameter(bias.detach()[list(places)], bias.requires_grad))


def take_inputs(layer: nn.Module, places: Sequence[int]) -> None:
    """Leaves a dense layer these of its inputs."""
    _take(layer, 1 - output_dimension(layer), places, ("in_features", "nx"))


def _take(layer: nn.Module, dimension: int, places: Sequence[int], counts: Sequence[str]) -> None:
    whole = weight_of(layer)
    detached = whole.detach()
    if list(places) == list(range(places[0], places[0] + len(places))):
        # No copy: a large model's matrices are tried by views of few numbers.
        taken = detached.narrow(dimension, places[0], len(places))
    else:
        taken = detached[list(places)] if dimension == 0 else detached[:, list(places)]
    layer.register_parameter("weight", nn.Parameter(taken, whole.requires_grad))
    for key in counts:
        if hasattr(layer, key):
            setattr(layer, key, len(places))


def multiply_by_rows(module: nn.Module) -> None:
    """Lets large linear layers take some rows of their weight at a time.

    A weight that is a view of fewer numbers, as made-up ones are, is copied whole to be multiplied by.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() > _AT_ONCE:
            layer.forward = partial(_by_rows, layer)  # type: ignore[method-assign]


def _by_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    rows = max(1, _AT_ONCE // layer.in_features)
    output = torch.cat([F.linear(x, part) for part in torch.split(layer.weight, rows)], -1)
    return output if layer.bias is None else output + layer.bias


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first place, place after the last) of each part."""
    return list(pairwise([0, *accumulate(sizes)]))


def packed_name(name: str, part: Part) -> str:
    """What a part of a parameter is called: `attention.qkv.weight#0:0-32`."""
    return f"{name}#{part[0]}:{part[1]}-{part[2]}"


def unpacked_name(name: str) -> tuple[str, Part | None]:
    """(the parameter's name, which part of it), None for a parameter that is whole."""
    whole, mark, where = name.partition("#")
    if not mark:
        return name, None
    dimension, _, places = where.partition(":")
    first, _, after = places.partition("-")
    return whole, (int(dimension), int(first), int(after))


def part_of(tensor: Tensor, part: Part | None) -> Tensor:
    """A part of a whole tensor."""
    return tensor if part is None else tensor.narrow(part[0], part[1], part[2] - part[1])


class PackedLinear(nn.Module):
    """A dense layer whose outputs are parts of these sizes, each a parameter of its own over a mesh's ranks.

    What it gives is this rank's share of each part, one after the other: what the whole layer gives, with
    shorter parts. One part keeps the names of the layer's parameters.
    """

    def __init__(self, layer: nn.Module, sizes: Sequence[int], mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._transposed = is_transposed(layer)
        self._names: list[tuple[str, str]] = []
        for first, after in spans(sizes):
            names = []
            for key, whole in layer.named_parameters(recurse=False):
                place = (output_dimension(layer) if key == "weight" else 0, first, after)
                names.append(key if len(sizes) == 1 else packed_name(key, place))
                mine = part_of(whole.detach(), place).contiguous()
                part = distribute_tensor(mine, mesh, [Shard(place[0])])
                self.register_parameter(names[-1], nn.Parameter(part, whole.requires_grad))
            self._names.append((names[0], names[1] if len(names) > 1 else ""))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → this rank's columns, [..., out / ranks]."""
        whole = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        parts = []
        for name, bias in self._names:
            weight: Any = self._parameters[name]
            part: Any = F.linear(
                whole, weight.t() if self._transposed else weight, self._parameters.get(bias)
            )
            parts.append(part.redistribute(placements=[Shard(-1)]).to_local())
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class TransposedRows(nn.Module):
    """A layer with a weight [in, out], of whose inputs each rank has its share; the sum is `spread`."""

    def __init__(self, layer: nn.Module, mesh: DeviceMesh, spread: Placement) -> None:
        super().__init__()
        self._mesh = mesh
        self._spread = spread
        for key, whole in layer.named_parameters(recurse=False):
            placement = Shard(0) if key == "weight" else Replicate()
            part = distribute_tensor(whole.detach(), mesh, [placement])
            self.register_parameter(key, nn.Parameter(part, whole.requires_grad))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """This rank's inputs, [..., in / ranks] → [..., out], of the sequence what `spread` says."""
        part = DTensor.from_local(x, self._mesh, [Shard(-1)], run_check=False)
        weight: Any = self._parameters["weight"]
        summed: Any = F.linear(part, weight.t(), self._parameters.get("bias"))
        local: Tensor = summed.redistribute(placements=[self._spread]).to_local()
        return local


def pack(
    model: nn.Module,
    styles: Mapping[str, str],
    packed: Mapping[str, Sequence[int]],
    mesh: DeviceMesh,
    spread: Placement,
) -> set[str]:
    """Puts layers of this module in the place of those that torch does not split; gives their names."""
    present = dict(model.named_modules())
    taken = set()
    for name, style in styles.items():
        layer = present.get(name)
        made: nn.Module
        if style == "column" and is_dense(layer) and (name in packed or is_transposed(layer)):
            assert layer is not None
            made = PackedLinear(layer, packed.get(name, (outputs_of(layer),)), mesh)
        elif style == "row" and layer is not None and is_transposed(layer):
            made = TransposedRows(layer, mesh, spread)
        else:
            continue
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._modules[key] = made
        taken.add(name)
    return taken
