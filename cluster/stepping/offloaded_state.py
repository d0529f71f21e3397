"""An optimizer's state that waits in the host's memory from one step to the next.

Ren et al. 2021 (ZeRO-Offload) take the step on the host. Here the state comes to the device in portions, and
the device's own kernels take the step, so that the weights are, bit for bit, those without offloading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from roundtable.cluster.parallel.strategy import PORTION
from roundtable.cluster.stepping.portions import step_by_portions


def offload_state(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer's steps fetch its state from the host's memory, and put it back there.

    The optimizer must treat each parameter by itself: it steps on a portion of them at a time.
    """
    step_by_portions(optimizer, PORTION, partial(_fetch, optimizer), partial(_put_back, optimizer))
    by_portions = optimizer.step

    def settled() -> None:
        by_portions()
        if any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"]):
            # Who reads the state next, such as a checkpoint, reads it on the host.
            torch.cuda.current_stream().synchronize()

    optimizer.step = settled  # type: ignore[method-assign, assignment]


def _fetch(optimizer: torch.optim.Optimizer, portion: Sequence[Tensor]) -> dict[tuple[Tensor, str], Tensor]:
    """Brings the state of a portion to where its parameters are; what it was copied from."""
    waiting: dict[tuple[Tensor, str], Tensor] = {}
    for parameter in portion:
        values = optimizer.state.get(parameter, {})
        for key, value in values.items():
            if _waits(value):
                waiting[parameter, key] = value
                values[key] = value.to(parameter.device, non_blocking=True, copy=True)
    return waiting


def _put_back(
    optimizer: torch.optim.Optimizer, portion: Sequence[Tensor], waiting: dict[tuple[Tensor, str], Tensor]
) -> None:
    """Copies the state of a portion to the host, over what it was copied from."""
    for parameter in portion:
        values = optimizer.state.get(parameter, {})
        for key, value in values.items():
            if _waits(value):
                place = waiting.get((parameter, key))
                if place is None:
                    place = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                values[key] = place.copy_(value, non_blocking=True)


def _waits(value: object) -> bool:
    """Counters stay: kernels want them where they are."""
    return isinstance(value, Tensor) and value.dim() > 0
