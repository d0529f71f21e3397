"""SCAFFOLD: control variates take out the drift of heterogeneous clients (Karimireddy et al. 2020)."""

from __future__ import annotations

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
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable

CONTROL = "control"
_POPULATION = "population"


class ScaffoldTable(AlgorithmTable):
    """`[algorithm]` with name = "scaffold"."""

    option: Literal[1, 2] = Field(
        2,
        description="what c_i becomes: 1 the gradient of x on all of the client's data, 2 the "
        "mean of its steps",
    )


class Scaffold(ClientAlgorithm):
    """Algorithm 1: steps on g − c_i + c, then option I c_i⁺ = ∇f_i(x), or II c_i⁺ = c_i − c + (x − y_i)/(η
    ‖a‖₁).

    ‖a‖₁ is K for plain SGD; with momentum the division by K diverges. Option I takes one more pass. The place
    `control` holds c on the way down and c_i⁺ − c_i on the way up; c_i stays at the client, and is 0 where no
    parameter is trained.
    """

    Table = ScaffoldTable
    places = (AlgorithmPlace(CONTROL),)
    composition = Composition(
        weightings=frozenset({"uniform"}),
        gradient_clipping=False,
        reason="its control variate c is the mean of all clients' c_i, each of weight 1/N",
    )

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        assert isinstance(table, ScaffoldTable)
        self.measures = table.option == 1

    @override
    def step(self) -> LocalStep:
        return LocalStep.of(self.table, corrected=True)

    @override
    def server(self) -> ServerAlgorithm:
        return ScaffoldServer()

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
        if self.measures:
            change = round.scratch["gradient"] - _own(round)
        else:
            moved = round.rate * round.step.effective_steps(steps, round.rate)
            change = round.on_trained(-round.down[CONTROL] - update / moved)
        return Sent(update, {CONTROL: change}, {CONTROL: _own(round) + change})


def _own(round: ClientRound) -> Tensor:
    return round.kept.get(CONTROL, torch.zeros_like(round.vector))


class ScaffoldServer(ServerAlgorithm):
    """x ← x + η_g · mean Δ_i; c ← c + |S|/N · mean (c_i⁺ − c_i) (equation 5).

    c is the mean over all N clients; the c_i of one that joins later is 0 until its first update. Where N has
    become another, c is scaled by what N was, which is the state.
    """

    @override
    def step(self, round: ServerRound) -> Moved:
        before = float(round.state.get(_POPULATION, torch.tensor([float(round.population)])))
        known = round.places[CONTROL] * (before / round.population)
        control = torch.add(known, round.up[CONTROL], alpha=round.present / round.population)
        after = {_POPULATION: torch.tensor([float(round.population)])}
        return Moved(round.optimize(round.update), {CONTROL: control}, after)
