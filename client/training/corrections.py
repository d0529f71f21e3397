"""What a `LocalStep` adds to the gradients of a module, in place, after each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.step import LocalStep

Correction = Callable[[], None]


def make_correction(
    step: LocalStep, parameters: Sequence[nn.Parameter], constants: Sequence[Tensor] | None = None
) -> Correction | None:
    """g ← g + pull · (w − x) + k, called with the round's start x in `parameters`; None if it adds nothing.

    `constants` are k by parameter. All parameters are reached, those too that the loss did not reach.
    """
    if not step.shifted:
        return None
    targets: list[Tensor] = list(parameters)
    anchors = [parameter.detach().clone() for parameter in targets] if step.pull else []
    added = list(constants) if step.corrected and constants is not None else []

    @torch.no_grad()
    def correct() -> None:
        gradients = [_gradient(parameter) for parameter in parameters]
        if anchors:
            torch._foreach_add_(gradients, list(torch._foreach_sub(targets, anchors)), alpha=step.pull)
        if added:
            torch._foreach_add_(gradients, added)

    return correct


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient, made of zeros where the loss did not reach it: the anchor still pulls."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
