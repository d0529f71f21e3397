"""Steps of an optimizer that are taken on some parameters at a time, whose state is brought and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def step_by_portions(
    optimizer: torch.optim.Optimizer,
    size: int,
    bring: Callable[[Sequence[Tensor]], Any],
    put_back: Callable[[Sequence[Tensor], Any], None],
) -> None:
    """Has the optimizer step on portions of `size` bytes of parameters; a larger one comes by itself.

    Before each portion's step `bring` is called with its parameters, after it `put_back`, with what `bring`
    gave. The optimizer must treat each parameter by itself.
    """
    step = optimizer.step

    @torch.no_grad()
    def by_portions() -> None:
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for group, parameters in zip(groups, whole, strict=True):
                for portion in _portions(parameters, size):
                    group["params"] = portion
                    brought = bring(portion)
                    step()
                    put_back(portion, brought)
                group["params"] = []
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    optimizer.step = by_portions  # type: ignore[method-assign, assignment]


def _portions(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    portion: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if portion and size + parameter.nbytes > most:
            yield portion
            portion, size = [], 0
        portion.append(parameter)
        size += parameter.nbytes
    if portion:
        yield portion
