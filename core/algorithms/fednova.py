"""FedNova: normalised averaging, for clients that take unequal numbers of steps (Wang et al. 2020)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    ClientAlgorithm,
    ClientRound,
    ClientShare,
    Composition,
    Moved,
    Sent,
    ServerAlgorithm,
    ServerRound,
)
from roundtable.core.algorithms.fedavg import ANY_LEVEL, WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import AggregationError
from roundtable.core.toml_tables import Finite


class FedNovaTable(AlgorithmTable):
    """`[algorithm]` with name = "fednova"."""

    mu: Finite = Field(0.0, ge=0, description="weight of a proximal term, as FedProx has it")
    tau: Literal["effective", "steps"] = Field(
        "effective",
        description="τ_eff: mean of ‖a_i‖₁, or of the steps K_i, as its authors' code has it with mu",
    )


class FedNova(ClientAlgorithm):
    """x ← x − τ_eff Σ p_i (x − y_i)/‖a_i‖₁ with τ_eff = Σ p_i ‖a_i‖₁ (section 4, equations 6 and 7).

    A client sends Δ_i/‖a_i‖₁. τ_eff scales everybody's update, so it follows at the server from the steps
    that the coordinator assigned, or the job gives a client of so many examples, not from a number that a
    client could choose. With the
    job's number of steps it is FedAvg, and clients send Δ_i.
    """

    Table = FedNovaTable

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        equal = table.equal_steps
        assert isinstance(table, FedNovaTable)
        # τ_eff = K is of [algorithm] steps; DP-SGD may be told others.
        levels = ANY_LEVEL if table.tau == "effective" else WHOLE_UPDATE_LEVELS
        self.composition = Composition(
            levels=levels if equal else frozenset({"none"}),
            gradient_clipping=False,
            masked=equal,
            unequal_steps=True,
            rules="any" if equal else "mean",
            reason="its server has to know each client's share and steps, and ‖a_i‖₁ those of a linear "
            "optimizer"
            + ("" if equal else ', unless algorithm.steps says them for all, with work = "equal"'),
        )

    @override
    def step(self) -> LocalStep:
        assert isinstance(self.table, FedNovaTable)
        return LocalStep.of(self.table, pull=self.table.mu)

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, FedNovaTable)
        return FedNovaServer(self.table, self.step())

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        if self.table.equal_steps:
            return Sent(update)
        return Sent(update / round.step.effective_steps(steps, round.rate))


class FedNovaServer(ServerAlgorithm):
    """x ← x + τ_eff · mean of what came."""

    def __init__(self, table: FedNovaTable, step: LocalStep) -> None:
        self._table = table
        self._step = step

    @override
    def step(self, round: ServerRound) -> Moved:
        table = self._table
        if table.steps is not None and table.equal_steps:
            plain = self._step.effective_steps(table.steps, table.rate(round.number))
            factor = table.steps / plain if table.tau == "steps" else 1.0
            return Moved(round.optimize(round.update * factor if factor != 1.0 else round.update))
        if not round.work:
            raise AggregationError("fednova: no client's share is known, and τ_eff is their mean")
        total = sum(each.share for each in round.work)
        effective = sum(each.share * self._steps(each, round.number) for each in round.work) / total
        return Moved(round.optimize(round.update * effective))

    def _steps(self, client: ClientShare, number: int) -> float:
        table = self._table
        if table.work == "by_speed" and client.steps is None:
            raise AggregationError("fednova: an update came without the steps that its client was given")
        by_data = table.passes * math.ceil(max(1, client.examples) / table.batch_size)
        steps = client.steps or table.steps or by_data
        return steps if table.tau == "steps" else self._step.effective_steps(steps, table.rate(number))
