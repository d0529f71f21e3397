"""SCAFFOLD: control variates take out the drift of heterogeneous clients (Karimireddy et al. 2020)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

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
from roundtable.core.algorithms.fedavg import ANY_LEVEL, WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import TaskError

CONTROL = "control"
_POPULATION = "population"


class ScaffoldTable(AlgorithmTable):
    """`[algorithm]` with name = "scaffold"."""

    option: Literal[1, 2] = Field(
        2,
        description="what c_i becomes: 1 the gradient of x on all of the client's data, 2 the "
        "mean of its steps",
    )
    usual_steps: int | None = Field(
        None,
        ge=1,
        description="a usual client's steps a round, for masks and privacy where no steps are given: what "
        "goes along beside the update is then about as long as it",
    )


class Scaffold(ClientAlgorithm):
    """Algorithm 1: steps on g − c_i + c, then option I c_i⁺ = ∇f_i(x), or II c_i⁺ = c_i − c + (x − y_i)/(η
    ‖a‖₁).

    ‖a‖₁ is K for plain SGD; with momentum the division by K diverges. The place `control` holds c on the way
    down; c_i stays at the client, and is 0 where no parameter is trained; c there is not looked at.
    Up goes, with

    - option II and the job's number of steps: nothing beside the update. As c_i⁺ − c_i = −c − Δ_i/(η ‖a‖₁),
      the server has their sum from that of the updates, and c costs no more privacy than these do: it follows
      from what is released (as in Noble et al. 2022, whose variates follow from noisy gradients).
    - option II and other steps: Δ_i ‖a₀‖₁/‖a_i‖₁, a₀ of `usual_steps`, which is clipped and noised with the
      update as one vector.
    - option I, which takes one more pass: c_i⁺ − c_i itself.

    Where the job clips, c_i follows from the clipped update, as what the server sums does.
    """

    Table = ScaffoldTable

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        assert isinstance(table, ScaffoldTable)
        self.measures = table.option == 1
        self._follows = table.option == 2 and table.equal_steps
        in_units = table.option == 2 and (table.steps or table.usual_steps) is not None
        remedy = "set algorithm.steps" + (" or usual_steps" if table.option == 2 else " and option = 2")
        self.places = (_place(in_units, not self._follows, remedy),)
        levels = ANY_LEVEL if self._follows else WHOLE_UPDATE_LEVELS if in_units else {"none"}
        self.composition = Composition(
            levels=frozenset(levels),
            weightings=frozenset({"uniform"}),
            unequal_steps=True,
            gradient_clipping=False,
            adaptive_clipping=False,
            rules="mean",
            reason="its control variate c is the mean of all clients' c_i, each of weight 1/N"
            + (
                "" if self._follows else ", and follows from the updates alone only with steps and option = 2"
            ),
        )

    @override
    def step(self) -> LocalStep:
        return LocalStep.of(self.table, corrected=True)

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, ScaffoldTable)
        return ScaffoldServer(self.table, self.step())

    @override
    def begin(self, round: ClientRound) -> Tensor:
        """The constant c − c_i (equation 3)."""
        if self.measures:
            assert round.measure is not None
            _, gradient = round.measure()
            # The decay is a part of the loss that the steps go down.
            round.scratch["gradient"] = gradient + round.step.weight_decay * round.on_trained(round.vector)
        return round.on_trained(round.down[CONTROL] - _own(round))

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        """c_i⁺ − c_i = −c − Δ_i/(η ‖a‖₁) (equation 4, option II)."""
        table = self.table
        assert isinstance(table, ScaffoldTable)
        if self.measures:
            change = round.scratch["gradient"] - _own(round)
            return Sent(update, {CONTROL: change}, {CONTROL: _own(round) + change})
        if self._follows and steps != table.steps:
            raise TaskError(
                f"algorithm 'scaffold': {steps} steps were taken where the job says {table.steps}, and its "
                "server counts on that"
            )
        effective = round.step.effective_steps(steps, round.rate)
        times = _usual(table, round.step, round.rate) / effective
        update = round.clipped(update, 1.0 if self._follows else math.hypot(1.0, times))
        change = round.on_trained(-round.down[CONTROL] - update / (round.rate * effective))
        up = {} if self._follows else {CONTROL: update * times}
        return Sent(update, up, {CONTROL: _own(round) + change})


def _place(in_units: bool, sent: bool, remedy: str) -> AlgorithmPlace:
    if not in_units:
        return AlgorithmPlace(CONTROL, remedy=remedy)
    return AlgorithmPlace(CONTROL, None, "joint", "joint", "sum", "as_update", sent=sent)


def _usual(table: ScaffoldTable, step: LocalStep, rate: float) -> float:
    """‖a₀‖₁ of a usual client, by which what is sent has the update's units."""
    return step.effective_steps(table.steps or table.usual_steps or 1, rate)


def _own(round: ClientRound) -> Tensor:
    return round.kept.get(CONTROL, torch.zeros_like(round.vector))


class ScaffoldServer(ServerAlgorithm):
    """x ← x + η_g · mean Δ_i; c ← c + |S|/N · mean (c_i⁺ − c_i) (equation 5).

    c is the mean over all N clients; the c_i of one that joins later is 0 until its first update. Where N has
    become another, c is scaled by what N was, which is the state.
    """

    def __init__(self, table: ScaffoldTable, step: LocalStep) -> None:
        self._table = table
        self._step = step

    @override
    def step(self, round: ServerRound) -> Moved:
        before = float(round.state.get(_POPULATION, torch.tensor([float(round.population)])))
        known = round.places[CONTROL] * (before / round.population)
        control = known + self._changes(round) / round.population
        after = {_POPULATION: torch.tensor([float(round.population)])}
        return Moved(round.optimize(round.update), {CONTROL: control}, after)

    def _changes(self, round: ServerRound) -> Tensor:
        """Σ (c_i⁺ − c_i) over those present."""
        divisor = round.divisor or round.present
        if self._table.option == 1:
            return round.up[CONTROL] * divisor
        rate = self._table.rate(round.number)
        moved = round.up.get(CONTROL, round.update) / _usual(self._table, self._step, rate)
        return -round.places[CONTROL] * round.present - moved * (divisor / rate)
