"""FedAvg: plain local SGD (McMahan et al. 2017, Algorithm 1, ClientUpdate)."""

from __future__ import annotations

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition

ANY_LEVEL = frozenset({"none", "client", "client_local", "example", "distributed", "dp_ftrl"})
WHOLE_UPDATE_LEVELS = ANY_LEVEL - {"example"}
"""Levels at which the update as a whole is clipped and has its noise, however it came about."""


class FedAvg(ClientAlgorithm):
    """The job's table says all there is."""

    composition = Composition(
        levels=ANY_LEVEL, own_optimizers=True, schedule=True, buffered=True, arrays=True
    )
