"""Steps of a client's second model, by SGD as the job's table says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.step import LocalStep


class HeldSteps:
    """v ← v − η (momentum and decay of ∇f(v) + pull · (v − anchor)), for parameters of one model.

    `anchor` are the parameters of another, in the same order.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        anchor: Sequence[Tensor],
        pull: float,
        rate: float,
        step: LocalStep,
    ) -> None:
        self._parameters = parameters
        self._anchor = anchor
        self._pull = pull
        self._step = step
        self._optimizer = torch.optim.SGD(
            parameters, lr=rate, momentum=step.momentum, weight_decay=step.weight_decay
        )

    def take(self, loss: Tensor) -> None:
        """One step down this loss."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, held in zip(self._parameters, self._anchor, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(parameter - held, alpha=self._pull)
        if self._step.max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._step.max_norm)
        self._optimizer.step()
