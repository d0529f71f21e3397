"""Further passes through a client's model, beside the one that a step takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from roundtable.core.layout import Layout


@contextmanager
def without_statistics(module: nn.Module) -> Iterator[None]:
    """Within, a pass in training mode leaves the running statistics of normalisation layers as they are."""
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
    ]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def copy_with(module: nn.Module, layout: Layout, values: Tensor) -> nn.Module:
    """A copy of the module, without gradients, that holds `values` [d]."""
    made = copy.deepcopy(module)
    made.zero_grad(set_to_none=True)
    put(made, layout, values)
    return made


@torch.no_grad()
def put(module: nn.Module, layout: Layout, values: Tensor) -> None:
    """Puts a flat vector [d] in the layout's order into the module."""
    tensors = module.state_dict(keep_vars=True)
    for name, value in layout.unflatten(values).items():
        tensors[name].copy_(value)
