"""Whether a module still is what it was: a task may write to it, or leave a part of it in another mode."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

_VERSION, _MODE = attrgetter("_version"), attrgetter("training")


class ModuleCondition:
    """How a module was when this was made: its parts and their modes, its tensors and what is in them."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        owners = [own for part in self._parts for own in (part._parameters, part._buffers) if own]
        self._owners: list[dict[str, Any]] = [*owners, *(p._modules for p in self._parts if p._modules)]
        self._tensors = [tensor for own in owners for tensor in own.values() if tensor is not None]
        self._before = self._now()

    def holds(self) -> bool:
        """Whether the module is as it was. Writing past autograd, by `.data`, is not seen."""
        return self._now() == self._before

    def _now(self) -> list[Any]:
        return [
            *map(id, chain.from_iterable(map(dict.values, self._owners))),
            *map(_VERSION, self._tensors),
            *map(Tensor.data_ptr, self._tensors),
            *map(_MODE, self._parts),
        ]
