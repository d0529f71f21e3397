"""Whether a task keeps, outside of the model's state, what changes its gradients.

Simulated clients share a task and a module: what code sets on them goes on from client to client, and from
which to which depends on the backend. It is told by results: the gradient of one batch is taken twice, from
the same weights and random numbers, and another client's calls lie between. What only counts calls or
remembers data changes nothing and passes; what changes something is looked for by name.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.core.task import Task

_SAME = {"cpu": 1e-4, "cuda": 1e-3}
"""Of the gradient: sums on a GPU may be added in another order each time."""
_DEEP, _WIDE = 4, 64
_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Carried:
    """change: of the gradient's norms and sums, as a share of its norm. names: attributes that moved."""

    change: float
    names: tuple[str, ...] = ()


def gradient_figures(module: nn.Module) -> Tensor:
    """float64 [2 + 2 x tensors with one], on CPU: a gradient's norm, its sum over the root of its size."""
    found = [torch.zeros(2, dtype=torch.float64)]
    for each in module.parameters():
        if each.requires_grad and each.grad is not None:
            gradient = each.grad.to_dense() if each.grad.is_sparse else each.grad
            total = gradient.sum(dtype=torch.float64) / math.sqrt(max(1, gradient.numel()))
            found.append(torch.stack([gradient.norm().double(), total]).cpu())
    return torch.cat(found)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of what is trained, and of the buffers that are part of the model's state."""
    return {name: value.detach().clone() for name, value in _state(module)}


def put_back(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Gives the module the state that `state_of` copied."""
    for name, value in _state(module):
        if name in kept:
            value.data = kept[name].clone()


def carried_state(
    task: Any,
    module: nn.Module,
    kept: Mapping[str, Tensor],
    before: Tensor,
    gradient: Callable[[], None],
    between: Callable[[], None],
    set_by_data: Callable[[], Sequence[str]],
    odd: bool,
) -> Carried | None:
    """What has moved the gradient since its figures were `before`; None for nothing.

    kept: the state of then. gradient: leaves the first batch's gradients in the module. between: calls the
    task as another client would, here from other weights. set_by_data: what data() has set on the task.
    odd: names are looked for anyway.
    """
    put_back(module, kept)
    with torch.no_grad():
        for each in module.parameters():
            if each.requires_grad:
                each.mul_(0.9)
    between()
    put_back(module, kept)
    gradient()
    after = gradient_figures(module)
    if len(after) != len(before) or not bool(torch.isfinite(after + before).all()):
        return None
    change = float((after - before).norm() / before.norm().clamp(min=1e-30))
    if not odd and change <= _SAME["cuda" if any(each.is_cuda for each in module.parameters()) else "cpu"]:
        return None
    put_back(module, kept)
    first, _first_held = _marks(task, module)
    gradient()
    second, _second_held = _marks(task, module)
    moved = [name for name, mark in second.items() if first.get(name) != mark]
    return Carried(change, tuple(dict.fromkeys((*moved, *set_by_data()))))


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    stays = module.state_dict().keys()
    yield from ((name, each) for name, each in module.named_parameters() if each.requires_grad)
    yield from ((name, each) for name, each in module.named_buffers() if name in stays)


def _marks(task: Any, module: nn.Module) -> tuple[dict[str, object], list[object]]:
    """What tells whether an attribute moved, by its name; and what must live as long as that is compared."""
    held: list[object] = []
    marks = {name: _mark(value, held, _DEEP) for name, value in _attributes(task, module)}
    return marks, held


def _attributes(task: Any, module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((f"self.{name}", value) for name, value in getattr(task, "__dict__", {}).items())
    for kind in type(task).__mro__:
        if kind in (Task, object):
            break
        for name, value in vars(kind).items():
            if not name.startswith("__") and not callable(value):
                yield f"{kind.__name__}.{name}", value
    stays = module.state_dict().keys()
    for path, part in module.named_modules():
        place = f"model.{path}." if path else "model."
        yield from ((place + name, value) for name, value in vars(part).items() if name not in _OF_MODULES)
        for name, value in part.named_buffers(recurse=False):
            if (f"{path}.{name}" if path else name) not in stays:
                yield place + name, value


def _mark(value: Any, held: list[object], depth: int) -> object:
    """Equal for a value that has not moved; memory that tensors share is not read."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    held.append(value)
    if isinstance(value, Tensor):
        return id(value), value.data_ptr(), 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.size <= 4096 else b""
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if depth == 0:
        return id(value)
    if isinstance(value, list | tuple | deque):
        latest = list(value)[-_WIDE:]
        return id(value), len(value), tuple(_mark(each, held, depth - 1) for each in latest)
    if isinstance(value, Mapping):
        pairs = list(value.items())[-_WIDE:]
        return id(value), len(value), tuple((str(key), _mark(each, held, depth - 1)) for key, each in pairs)
    if isinstance(value, nn.Module):
        return tuple(_mark(each, held, depth - 1) for each in (*value.parameters(), *value.buffers()))
    own = list(getattr(value, "__dict__", {}).items())[:_WIDE]
    return id(value), tuple((name, _mark(each, held, depth - 1)) for name, each in own)
