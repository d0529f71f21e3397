"""Compiled steps held against autograd and SGD in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.core import Layout
from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.compiled_step import CompiledProgram
from roundtable.simulation.backends.vectorised.recorded_steps import Steps
from roundtable.simulation.backends.vectorised.recorded_work import Manner


class Anything:
    """A task of any model and loss; `Steps` asks for no more."""

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._loss = loss

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss(model, batch)


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def stepped(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss: Callable[[nn.Module, Any], Tensor] = classified,
    update: LocalStep | None = None,
) -> CompiledProgram:
    """Three steps of the compiled program, held against autograd and SGD in double precision."""
    update = update or LocalStep()
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(loss), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), update)
    program = steps.prepare(batch, Manner(update))
    assert isinstance(program, CompiledProgram)
    twin = model.double()
    start = [p.detach().clone() for p in twin.parameters()]
    optimizer = torch.optim.SGD(
        twin.parameters(), lr=0.05, momentum=update.momentum, weight_decay=update.weight_decay
    )
    exact = [part.double() if part.is_floating_point() else part for part in batch]
    for number in range(3):
        optimizer.zero_grad()
        expected = loss(twin, exact)
        expected.backward()
        for parameter, origin in zip(twin.parameters(), start, strict=True):
            if parameter.grad is not None:
                parameter.grad += update.pull * (parameter.detach() - origin)
        if update.max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), update.max_norm)
        optimizer.step()
        found = steps.take(batch, Manner(update), 0.05)
        assert float(found) == pytest.approx(float(expected.detach()), rel=2e-5, abs=2e-6), number
    for name, value in layout.unflatten(steps.weights).items():
        torch.testing.assert_close(value.double(), twin.state_dict()[name], rtol=5e-5, atol=5e-6, msg=name)
    return program
