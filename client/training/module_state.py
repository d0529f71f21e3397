"""A module lent to one client: its weights go in, and what is not theirs is put back after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from roundtable.core.errors import TaskError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import Rule


@contextmanager
def borrowed(
    module: nn.Module, layout: Layout, vector: Tensor, local: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """The module with these weights in it; what the vector does not hold is put back at the end.

    Raises TaskError at the end where a frozen tensor has been changed meanwhile, now or by an earlier client.
    """
    frozen = [spec.name for spec in layout.frozen]
    if frozen and module not in _frozen_sums:
        _frozen_sums[module] = _sums_of(module, frozen)
    resting = {**outside(module, layout, "local"), **outside(module, layout, "drop")}
    layout.load(module, vector)
    _put(module, {name: value for name, value in (local or {}).items() if name in resting})
    try:
        yield
    finally:
        _put(module, resting)
    if frozen:
        _check_frozen(module, frozen)


_frozen_sums: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
"""Of each module's frozen tensors as they were made."""


def _sums_of(module: nn.Module, names: list[str]) -> list[int]:
    """A sum over each tensor's bits: one pass over its memory, where it lies."""
    state = module.state_dict()
    return torch.stack([bit_sum(state[name]) for name in names]).tolist()


def bit_sum(tensor: Tensor) -> Tensor:
    """int64 scalar, another one for almost any other values of the tensor: a sum of its words of 8 bytes,
    which wraps around, and of the bytes behind them."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = flat.numel() // 8 * 8
    return flat[:end].view(torch.int64).sum() + flat[end:].sum(dtype=torch.int64)


def _check_frozen(module: nn.Module, names: list[str]) -> None:
    now = _sums_of(module, names)
    for name, before, after in zip(names, _frozen_sums[module], now, strict=True):
        if before != after:
            raise frozen_changed(name)


def frozen_changed(name: str) -> TaskError:
    """The error of a task that changes what it has frozen."""
    return TaskError(
        f"parameter {name!r} is frozen (requires_grad = False in model()), and the task changed it: as "
        'frozen weights do not travel, what it learnt would be lost. Set [model] travel = "all", or '
        "register it as a buffer"
    )


def outside(module: nn.Module, layout: Layout, rule: Rule) -> dict[str, Tensor]:
    """Copies, on CPU, of the module's tensors with this rule."""
    names = [spec.name for spec in layout.tensors if spec.rule == rule and spec.alias_of is None]
    if not names:
        return {}
    state = module.state_dict()
    return {name: state[name].detach().to("cpu", copy=True) for name in names if name in state}


def _put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    if values:
        state = module.state_dict()
        for name, value in values.items():
            state[name].copy_(value)
