"""q-FedAvg: clients with larger losses count for more (Li et al. 2020, "Fair Resource Allocation")."""

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

_CURVATURE = "curvature"


class QFedAvgTable(AlgorithmTable):
    """`[algorithm]` with name = "qfedavg"."""

    q: Finite = Field(ge=0, description="0 is FedAvg over equal clients; the larger, the fairer")


class QFedAvg(ClientAlgorithm):
    """Algorithm 2 with L = 1/η and F_i the loss of x on all of the client's training data.

    Client i sends F_i^q Δ_i/η, and in the place `curvature` h_i = q F_i^(q−1) ‖Δ_i/η‖² + F_i^q/η.
    """

    Table = QFedAvgTable
    places = (AlgorithmPlace(_CURVATURE, shape=(1,)),)
    measures = True
    tells_loss = True
    composition = Composition(
        weightings=frozenset({"uniform"}),
        masked=False,
        reason="sizes enter by sampling, and its sums have no weights; nothing bounds a client's loss",
    )

    @override
    def server(self) -> ServerAlgorithm:
        return QFedAvgServer()

    @override
    def counted_on(self) -> bool:
        """A client keeps nothing."""
        return False

    @override
    def begin(self, round: ClientRound) -> None:
        assert round.measure is not None
        round.scratch["loss"], _ = round.measure()

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        assert isinstance(self.table, QFedAvgTable)
        q, loss = self.table.q, torch.tensor(round.scratch["loss"], dtype=torch.float64)
        moved = update / round.rate
        slope = q * loss ** (q - 1.0) * (moved.double() @ moved.double()) if q else 0.0
        curvature = slope + loss**q / round.rate
        return Sent(moved * float(loss**q), {_CURVATURE: curvature.float().reshape(1)})


class QFedAvgServer(ServerAlgorithm):
    """x ← x + Σ F_i^q Δ_i/η ÷ Σ h_i; the place goes down as zero."""

    @override
    def step(self, round: ServerRound) -> Moved:
        change = round.update / round.up[_CURVATURE].clamp_min(torch.finfo(torch.float32).tiny)
        return Moved(round.optimize(change), {_CURVATURE: torch.zeros(1)})
