"""FedExP: the server extrapolates where clients disagree (Jhunjhunwala et al. 2023, Algorithm 1)."""

from __future__ import annotations

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


class FedExpTable(AlgorithmTable):
    """`[algorithm]` with name = "fedexp"."""

    epsilon: Finite = Field(1e-3, gt=0, description="ε, which keeps the server's rate finite")


class FedExp(ClientAlgorithm):
    """FedAvg at the client; in the place `squared_norm` ‖Δ_i‖² goes along."""

    Table = FedExpTable
    places = (AlgorithmPlace(_SQUARED, shape=(1,)),)
    composition = Composition(
        own_optimizers=True, schedule=True, reason="the norms of updates are a second release"
    )

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, FedExpTable)
        return FedExpServer(self.table.epsilon)

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {_SQUARED: update.double().square().sum().float().reshape(1)})


class FedExpServer(ServerAlgorithm):
    """x ← x + η_g Σ p_i Δ_i with η_g = max(1, Σ p_i ‖Δ_i‖² / (2 (‖Σ p_i Δ_i‖² + ε))) (equation 6)."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    @override
    def step(self, round: ServerRound) -> Moved:
        mean = float(round.update.double().square().sum())
        rate = max(1.0, float(round.up[_SQUARED]) / (2 * (mean + self._epsilon)))
        return Moved(round.optimize(round.update * rate), {_SQUARED: torch.zeros(1)})
