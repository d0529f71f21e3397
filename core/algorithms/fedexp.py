"""FedExP: the server extrapolates where clients disagree (Jhunjhunwala et al. 2023, Algorithm 1)."""

from __future__ import annotations

import math

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
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_SQUARED = "squared_norm"
_SHARE = 0.25


class FedExpTable(AlgorithmTable):
    """`[algorithm]` with name = "fedexp"."""

    epsilon: Finite = Field(1e-3, gt=0, description="ε, which keeps the server's rate finite")


class FedExp(ClientAlgorithm):
    """FedAvg at the client; in the place `squared_norm` ‖Δ_i‖² goes along.

    Where the job clips to C it goes as ‖Δ_i‖²/4C, at most a quarter of C, in one norm with the update.
    """

    Table = FedExpTable
    places = (AlgorithmPlace(_SQUARED, shape=(1,), clipping="joint", masks="sum"),)
    composition = Composition(
        own_optimizers=True,
        schedule=True,
        adaptive_clipping=False,
        reason="the norms of updates are a second release",
    )

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, FedExpTable)
        return FedExpServer(self.table.epsilon)

    @override
    def counted_on(self) -> bool:
        """A client keeps nothing."""
        return False

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        update = round.clipped(update, math.hypot(1.0, _SHARE))
        square = update.double().square().sum() * _unit(round.bound)
        return Sent(update, {_SQUARED: square.float().reshape(1)})


def _unit(bound: float | None) -> float:
    """By what ‖Δ_i‖² is multiplied on its way."""
    return 1.0 if bound is None else _SHARE / bound


class FedExpServer(ServerAlgorithm):
    """x ← x + η_g Σ p_i Δ_i with η_g = max(1, Σ p_i ‖Δ_i‖² / (2 (‖Σ p_i Δ_i‖² + ε))) (equation 6)."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    @override
    def step(self, round: ServerRound) -> Moved:
        mean = float(round.update.double().square().sum())
        rate = max(1.0, float(round.up[_SQUARED]) / _unit(round.bound) / (2 * (mean + self._epsilon)))
        return Moved(round.optimize(round.update * rate), {_SQUARED: torch.zeros(1)})
