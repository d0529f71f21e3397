"""FedProx: a proximal term holds local training near the global model (Li et al. 2020, equation 2)."""

from __future__ import annotations

from pydantic import Field
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition
from roundtable.core.algorithms.fedavg import ANY_LEVEL
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite


class FedProxTable(AlgorithmTable):
    """`[algorithm]` with name = "fedprox"."""

    mu: Finite = Field(gt=0, description="weight of the proximal term μ/2·‖w − w_global‖²")


class FedProx(ClientAlgorithm):
    """g ← g + μ (w − w_global), the gradient of μ/2·‖w − w_global‖²."""

    Table = FedProxTable
    composition = Composition(levels=ANY_LEVEL, own_optimizers=True, schedule=True, buffered=True)

    @override
    def step(self) -> LocalStep:
        """With the pull μ."""
        assert isinstance(self.table, FedProxTable)
        return LocalStep.of(self.table, pull=self.table.mu)
