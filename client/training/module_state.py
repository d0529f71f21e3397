"""A module lent to one client: its weights go in, and what is not theirs is put back after."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import Rule


@contextmanager
def borrowed(
    module: nn.Module, layout: Layout, vector: Tensor, local: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """The module with these weights in it; what the vector does not hold is put back at the end."""
    resting = {**outside(module, layout, "local"), **outside(module, layout, "drop")}
    layout.load(module, vector)
    _put(module, {name: value for name, value in (local or {}).items() if name in resting})
    try:
        yield
    finally:
        _put(module, resting)


def outside(module: nn.Module, layout: Layout, rule: Rule) -> dict[str, Tensor]:
    """Copies, on CPU, of the module's tensors with this rule."""
    names = [spec.name for spec in layout.tensors if spec.rule == rule and spec.alias_of is None]
    if not names:
        return {}
    state = module.state_dict()
    return {name: state[name].detach().to("cpu", copy=True) for name in names if name in state}


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the global generators of torch, NumPy and Python inside, and puts them back after."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_all(seed, device)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds the global generators of torch, NumPy and Python."""
    seed_torch(seed, device)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    if values:
        state = module.state_dict()
        for name, value in values.items():
            state[name].copy_(value)


def seed_torch(seed: int, device: torch.device) -> None:
    """What `torch.manual_seed` does for this device; that one also queues a stack trace for every kind of
    accelerator that is not there, which takes longer than a small client's training and is never freed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
