"""Algorithms that a job names as `own_algorithms.py:Class`, one for each way to change a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn

from roundtable.core.algorithms.contract import (
    AlgorithmPlace,
    ClientAlgorithm,
    ClientRound,
    Composition,
    Moved,
    Sent,
    ServerAlgorithm,
    ServerRound,
)
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable


class Damped(ClientAlgorithm):
    """Scales every gradient, which no `LocalStep` says."""

    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        loss, found = work.gradients()
        return loss, [None if gradient is None else gradient * 0.1 for gradient in found]


class Choosy(ClientAlgorithm):
    """Looks at a value to choose what a step is: nothing that a recording could say."""

    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        loss, found = work.gradients()
        return loss, found if float(loss) > 0.5 else [None] * len(found)


class Placed(ClientAlgorithm):
    """Puts something into each client's module."""

    @contextmanager
    def while_training(self, round: ClientRound, module: nn.Module) -> Iterator[None]:
        with torch.no_grad():
            next(module.parameters()).mul_(0.5)
        yield


class HeldTable(AlgorithmTable):
    strength: float = Field(gt=0)


class Held(ClientAlgorithm):
    """FedProx under another name: all that it does is in its step."""

    Table = HeldTable
    composition = Composition(own_optimizers=True)

    def step(self) -> LocalStep:
        assert isinstance(self.table, HeldTable)
        return LocalStep.of(self.table, pull=self.table.strength)


class HeldInPart(Held):
    """One tensor moves neither by the loss nor by the pull or decay."""

    def resting(self, model: nn.Module) -> list[str]:
        return [next(name for name, _ in model.named_parameters())]


class Ordinary:
    """No algorithm at all."""


class ControlVariates(ClientAlgorithm):
    """Karimireddy et al. 2020, Algorithm 1 with option II, as somebody would write it beside a job."""

    places = (AlgorithmPlace("c"),)
    composition = Composition(weightings=frozenset({"uniform"}), gradient_clipping=False)

    def step(self) -> LocalStep:
        return LocalStep.of(self.table, corrected=True)

    def server(self) -> ServerAlgorithm:
        return ControlVariatesServer()

    def begin(self, round: ClientRound) -> Tensor:
        return round.on_trained(round.down["c"] - round.kept.get("c", torch.zeros_like(round.vector)))

    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        own = round.kept.get("c", torch.zeros_like(round.vector))
        new = round.on_trained(own - round.down["c"] - update / (round.rate * steps))
        return Sent(update, {"c": new - own}, {"c": new})


class ControlVariatesServer(ServerAlgorithm):
    def step(self, round: ServerRound) -> Moved:
        share = round.present / round.population
        return Moved(round.optimize(round.update), {"c": round.places["c"] + share * round.up["c"]})
