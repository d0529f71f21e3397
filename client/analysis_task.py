"""The task of every analysis: no model to speak of, and the silo's tables as its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.own_question import OwnForm
from roundtable.core.tables.silo_tables import SiloTables
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
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


class OwnAnalysis(AnalysisTask):
    """An analysis of one's own: subclass it, name it as the `code` of a survey, and have silos offer it.

    A silo offers and approves it as any task ([tasks.NAME] with use and blake3); parameters of `__init__`
    come from the survey's [parameters]. Round 1 asks for numbers of rows, later rounds for sums over rows of
    the cells that reached the least count. Every total is public: to the silos from then on, and to readers.
    `columns` is what the study says of its columns, by name.
    """

    @override
    def data(self, site: Site) -> SiloTables:
        tables = site.tables
        tables.code = self
        return tables

    def form(self, columns: Mapping[str, ColumnTable]) -> OwnForm:
        """What it reads and sends: the same at every party. Counts of one line (the last axis) are taken to
        have a known sum, so that two of them are hidden or none."""
        raise NotImplementedError(f"{type(self).__name__} has no form()")

    def count(self, table: DataTable) -> Mapping[str, Any]:
        """The counts of a silo's rows by name, whole numbers in the shapes of the form."""
        raise NotImplementedError(f"{type(self).__name__} has no count()")

    def add_up(self, table: DataTable, known: Mapping[str, np.ndarray], round: int) -> Mapping[str, Any]:
        """A silo's sums of this round by name, float64 in the shape of the count and then of the sum, within
        ± 2^34: scale by the columns' ranges.

        `known` has the totals of the rounds before, NaN where they are hidden. What is given for a cell that
        is hidden does not leave the silo.
        """
        return {}

    def answer(
        self, known: Mapping[str, np.ndarray], columns: Mapping[str, ColumnTable]
    ) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """(header, rows) of the answer, out of all totals; it runs where the answer is read."""
        raise NotImplementedError(f"{type(self).__name__} has no answer()")
