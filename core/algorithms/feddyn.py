"""FedDyn: each client's loss is regularised so that the fixed points agree (Acar et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import (
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
from roundtable.core.toml_tables import Finite

_GRADIENT, _MEAN, _POPULATION = "gradient", "mean", "population"


class FedDynTable(AlgorithmTable):
    """`[algorithm]` with name = "feddyn"."""

    alpha: Finite = Field(gt=0, description="weight α of the dynamic regulariser")


class FedDyn(ClientAlgorithm):
    """Algorithm 1: steps on g − g_i + α (y − x), then g_i ← g_i − α Δ_i. g_i stays at the client.

    Its fixed point is the optimum of the plain mean of the clients' losses, whatever their sizes.
    """

    Table = FedDynTable
    keeps = "the gradient of its earlier rounds"
    composition = Composition(
        weightings=frozenset({"uniform"}),
        unequal_steps=True,
        gradient_clipping=False,
        adaptive_clipping=False,
        server_optimizer=False,
        averaged_buffers=False,
        rules="mean",
        reason="its server holds h, the plain mean of all clients' g_i, which nothing else may move, and in "
        "which noise would add up",
    )

    @override
    def step(self) -> LocalStep:
        return LocalStep.of(self.table, pull=self._alpha, corrected=True)

    @override
    def server(self) -> ServerAlgorithm:
        return FedDynServer(self._alpha)

    @override
    def counted_on(self) -> bool:
        """h is the mean of what clients keep."""
        return True

    @override
    def begin(self, round: ClientRound) -> Tensor:
        """The constant −g_i."""
        return -_own(round)

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        update = round.clipped(update)
        return Sent(update, {}, {_GRADIENT: _own(round) - self._alpha * round.on_trained(update)})

    @property
    def _alpha(self) -> float:
        assert isinstance(self.table, FedDynTable)
        return self.table.alpha


def _own(round: ClientRound) -> Tensor:
    return round.kept.get(_GRADIENT, torch.zeros_like(round.vector))


class FedDynServer(ServerAlgorithm):
    """h ← h − (α/N) Σ_present Δ_i; x ← mean_present(y_i) − h/α. h is scaled where N has become another."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    @override
    def init(self, columns: int) -> Mapping[str, Tensor]:
        return {_MEAN: torch.zeros(columns), _POPULATION: torch.zeros(1)}

    @override
    def step(self, round: ServerRound) -> Moved:
        known = float(round.state[_POPULATION]) or float(round.population)
        mean = round.state[_MEAN] * (known / round.population)
        mean = torch.add(mean, round.update, alpha=-self._alpha * round.present / round.population)
        model = round.model + round.update - mean / self._alpha
        state = {_MEAN: mean, _POPULATION: torch.tensor([float(round.population)])}
        return Moved(model, state=state)
