"""Whether a module or a task still is what it was: tasks write to them, or leave a part in another mode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OF_TORCH = frozenset(vars(nn.Module()))
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


class ModuleComposition:
    """What a module was made of when this was made: its parts, the very tensors that are their parameters and
    buffers, whatever is in them, and what else its code has set on it, with what is in that."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = list(_composition(module))

    def holds(self) -> bool:
        """Whether the module is made of the same."""
        now = list(_composition(self._module))
        return len(now) == len(self._before) and all(map(_same, now, self._before))


class TaskState:
    """What a task had set on itself when this was made, and what was in it: tensors, lists, tuples, dicts."""

    def __init__(self, task: object) -> None:
        self._task = task
        self._before = list(_leaves(task))

    def holds(self) -> bool:
        """Whether that is the same. What a task keeps elsewhere, or in other objects, is not seen."""
        now = list(_leaves(self._task))
        return len(now) == len(self._before) and all(map(_same, now, self._before))


def _leaves(task: object) -> Iterator[Any]:
    for leaf in tree_leaves(getattr(task, "__dict__", {})):
        yield leaf
        if isinstance(leaf, Tensor):
            yield leaf._version


def _composition(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        yield part
        yield from part._parameters.values()
        yield from part._buffers.values()
        for name, value in vars(part).items():
            for leaf in () if name in _OF_TORCH else tree_leaves(value):
                yield leaf
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield leaf._version


def _same(one: Any, other: Any) -> bool:
    plain = isinstance(one, bool | int | float | str)
    return one is other or (plain and type(one) is type(other) and one == other)
