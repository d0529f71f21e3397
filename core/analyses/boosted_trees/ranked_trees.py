"""Trees that rank the rows of each query: patients of a ward, offers to a customer, documents of a search.

A query's rows lie in one silo, which forms its pairs alone: the same number at two silos is two queries. What
leaves are the same histograms as of other trees. A query is held out as a whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.boosted_rows import BoostedRows, remembered
from roundtable.core.analyses.boosted_trees.boosting import BoostedTrees
from roundtable.core.analyses.boosted_trees.boosting_objectives import Boosting
from roundtable.core.analyses.boosted_trees.feature_bins import BoostingPlan
from roundtable.core.analyses.boosted_trees.ranking_objectives import (
    MOST_RELEVANT,
    NdcgRanking,
    PairwiseRanking,
    ndcg,
)
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape, Sums
from roundtable.core.analyses.question import TOO_FEW
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_WHOLE = float(1 << 53)


class RankedTrees(BoostedTrees):
    """Gradient-boosted trees whose higher predictions are for the more relevant rows of a query: `outcome` is
    the relevance, `query` the column whose equal values make a query, `by_ndcg` whether pairs count by NDCG,
    `top` how many of the first rows are paired with all others."""

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        plan: BoostingPlan,
        query: str,
        by_ndcg: bool,
        top: int,
    ) -> None:
        self.query = query
        self.by_ndcg = by_ndcg
        self.top = top
        super().__init__(columns, least, title, outcome, on, plan)
        self.described(query)

    @override
    def _objective(self) -> Boosting:
        column = self.described(self.outcome)
        if column.kind == "category":
            highest, lowest = len(column.values) - 1.0, 0.0
        else:
            column = self.number(self.outcome)
            highest, lowest = column.most or 0.0, column.least or 0.0
        if lowest < 0 or highest > MOST_RELEVANT:
            raise ConfigError(
                f"{self.title}: relevance is a whole number from 0 to {MOST_RELEVANT}, as its gain is two to "
                f"that power: set least and most in [columns.{self.outcome}], or name a category"
            )
        return (NdcgRanking if self.by_ndcg else PairwiseRanking)(top=self.top)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome, self.query)

    @property
    @override
    def _asks_mean(self) -> bool:
        return False

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {**super().counts, "queries": (2,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {**super().public, "queries": (2,)}

    @property
    @override
    def _metric_name(self) -> str:
        return f"{self.objective.metric}@{self.top}"

    @override
    def _outcome_of(self, table: DataTable) -> Doubles:
        """The relevance of rows that have one, and a query."""
        found, query = table.column(self.outcome), table.column(self.query)
        for name, values in ((self.outcome, found), (self.query, query)):
            there = ~np.isnan(values)
            if (values[there] != np.rint(values[there])).any() or (np.abs(values[there]) >= _WHOLE).any():
                raise TaskError(
                    f"column {name!r} has a value that is no whole number below 2^53: queries and relevance "
                    "are such numbers"
                )
        return np.where(np.isnan(query), np.nan, found)

    @override
    def _held_of(self, table: DataTable) -> Any:
        found, place = np.unique(table.column(self.query), return_inverse=True)
        return (np.random.default_rng(self.plan.seed).random(len(found)) < self.plan.held_out)[place]

    def _queries_of(self, table: DataTable) -> Doubles:
        """The query of each row that counts."""
        key = ("queries of rows", self.title, self.outcome, self.query)
        found: Doubles = remembered(
            table.derived, key, lambda: table.column(self.query)[~np.isnan(self._outcome_of(table))]
        )
        return found

    @override
    def _around(self, table: DataTable, rows: dict[str, Any], public: Arrays) -> Doubles | None:
        return self._queries_of(table)[:, None]

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> Sums:
        found = super().sums(table, public, stage)
        if stage == 0:
            held, queries = self._rows_of(table)["held"], self._queries_of(table)
            counted = [float(len(np.unique(queries[part]))) for part in (~held, held)]
            return {**found, "queries": np.array(counted)}
        return found

    @override
    def _loss_sums(self, state: BoostedRows, held: Any, public: Arrays) -> dict[str, Doubles]:
        assert state.around is not None
        margins, queries = state.margins[:, 0], state.around[:, 0]
        parts = (~held, held)
        found = [ndcg(margins[part], state.outcome[part], queries[part], self.top) for part in parts]
        return {"losses": np.array(found)}

    @override
    def _base(self, counted: Doubles) -> float:
        return 0.0 if self.plan.base_score is None else self.plan.base_score

    @override
    def _begin(self, sums: Arrays) -> dict[str, Any]:
        found, queries = super()._begin(sums), sums["queries"]
        found["queries"] = self.hide(queries)
        if self._too_few(queries[:1], float(queries[1])):
            return {**found, "stage": -float(TOO_FEW)}
        return found

    @override
    def _metric(self, public: Arrays, sums: Arrays) -> Doubles:
        found: Doubles = sums["losses"] / np.maximum(public["queries"], 1.0)
        return found
