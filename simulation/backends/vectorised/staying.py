"""Tensors that stay at each client, for as long as a client trains: floats behind the vector that travels,
integers as counters, which a step adds to and never reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import DTYPES, TensorSpec

_STAYING = ("local", "drop")


def stays(spec: TensorSpec) -> bool:
    """Whether the tensor is each client's own."""
    return spec.rule in _STAYING


def is_counter(spec: TensorSpec) -> bool:
    """Whether a recorded step can only count up in it."""
    return stays(spec) and not DTYPES[spec.dtype].is_floating_point


class StayingTensors:
    """The layout of a client's whole vector, [d + e]: what travels, and behind it the floats that stay."""

    def __init__(self, travelling: Layout, model: nn.Module) -> None:
        """`model` has the job's initial weights: a client has those of what stays until it keeps its own."""
        self._size = offset = travelling.size
        specs = []
        for spec in travelling.tensors:
            if stays(spec) and not is_counter(spec):
                place = offset if spec.alias_of is None else -1
                specs.append(replace(spec, rule="average", offset=place))
                offset += spec.size if place >= 0 else 0
            else:
                specs.append(spec)
        self.layout = Layout(tuple(specs))
        state = model.state_dict()
        own = [spec for spec in travelling.tensors if stays(spec) and spec.alias_of is None]
        self._initial = {spec.name: state[spec.name].detach().to("cpu", copy=True) for spec in own}
        self._kept = {spec.name for spec in own if spec.rule == "local"}
        self._places = {
            spec.name: slice(spec.offset, spec.offset + spec.size)
            for spec in self.layout.tensors
            if spec.name in self._initial and spec.offset >= 0
        }

    def whole(self, vector: Tensor, local: Mapping[str, Tensor] | None) -> Tensor:
        """The vector [d] with what the client has kept behind it; the vector itself where nothing stays."""
        if not self._places:
            return vector
        return torch.cat([vector, *(self._now(name, local).reshape(-1) for name in self._places)])

    def longer(self, constant: Tensor | None) -> Tensor | None:
        """A constant [d] with zeros for what stays."""
        if constant is None or not self._places:
            return constant
        return torch.cat([constant, constant.new_zeros(self.layout.size - self._size)])

    def kept(
        self, weights: Tensor, counts: Mapping[str, int], local: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """What stays after steps that ended with `weights` [d + e] and counted so far, on CPU, by name."""
        found = {}
        for name in self._kept:
            if name in self._places:
                value = weights[self._places[name]].to("cpu", copy=True).view(self._initial[name].shape)
            else:
                value = self._now(name, local) + counts.get(name, 0)
            found[name] = value
        return found

    def _now(self, name: str, local: Mapping[str, Tensor] | None) -> Tensor:
        return local[name] if local and name in local and name in self._kept else self._initial[name]
