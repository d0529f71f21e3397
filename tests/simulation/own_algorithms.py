"""Algorithms that a job names as `own_algorithms.py:Class`, one for each way to change a step."""

from __future__ import annotations

import torch
from pydantic import Field

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition, GradientWork
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable


class Damped(ClientAlgorithm):
    """Scales every gradient by a hook of its own, which no `LocalStep` says."""

    def after_gradient(self, work: GradientWork) -> None:
        with torch.no_grad():
            for parameter in work.parameters:
                if parameter.grad is not None:
                    parameter.grad *= 0.1


class HeldTable(AlgorithmTable):
    strength: float = Field(gt=0)


class Held(ClientAlgorithm):
    """FedProx under another name: all that it does is in its step."""

    Table = HeldTable
    composition = Composition(own_optimizers=True)

    def step(self) -> LocalStep:
        assert isinstance(self.table, HeldTable)
        return LocalStep.of(self.table, pull=self.table.strength)


class Ordinary:
    """No algorithm at all."""
