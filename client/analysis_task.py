"""The task of every analysis: no model to speak of, and the silo's tables as its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.tables.silo_tables import SiloTables
from roundtable.core.task import ArrayTask, Site


class AnalysisTask(ArrayTask):
    """`task = "analysis"`: the job's [algorithm] says what is asked of the tables."""

    @override
    def weights(self) -> dict[str, np.ndarray]:
        return {"nothing": np.zeros(1, dtype=np.float32)}

    @override
    def data(self, site: Site) -> SiloTables:
        return site.tables

    @override
    def fit(
        self, weights: dict[str, np.ndarray], data: SiloTables, options: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], int, dict[str, float]]:
        """For who tries what a silo offers: reads every table, and tells nothing of them."""
        for name in data:
            data.read(name)
        return weights, 1, {}
