"""Trees of hazards: before each tree the silos' sums of hazards by interval of time, and what follows.

Times count as the ends of a grid's intervals, which are merged until no row, or at least the least count of
them, leaves each. Ties are Breslow's: whoever leaves in an interval is at risk in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.boosted_rows import BoostedRows
from roundtable.core.analyses.boosted_trees.boosting import RISK, BoostedTrees
from roundtable.core.analyses.boosted_trees.boosting_objectives import GRAIN, Boosting, CoxLoss
from roundtable.core.analyses.boosted_trees.feature_bins import BoostingPlan
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape, Singles, Whole
from roundtable.core.analyses.survival.time_grid import TimeGrid, merged
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_UNIT = 4.0


class BoostedHazards(BoostedTrees):
    """Gradient-boosted trees of a time until an event, or until somebody was last seen."""

    begins: ClassVar[int] = RISK

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        plan: BoostingPlan,
        event: str,
        every: float,
    ) -> None:
        self.event = event
        self.every = every
        super().__init__(columns, least, title, outcome, on, plan)

    @override
    def _objective(self) -> Boosting:
        self.grid = TimeGrid(self, self.outcome, self.event, self.every)
        return CoxLoss(unit=_UNIT, classes=2, hessian_unit=_UNIT)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.outcome, self.event, *self.on)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome, self.event)

    @property
    @override
    def _first_stages(self) -> int:
        return max(1, super()._first_stages)

    @property
    @override
    def rounds(self) -> int:
        return super().rounds + self.plan.rounds

    @property
    def intervals(self) -> int:
        """Of the grid, before any are merged."""
        return self.grid.intervals

    @property
    def _each(self) -> Shape:
        """By interval, of the rows that trees are grown on and of those held out."""
        return (2, self.intervals)

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {**super().counts, "leavers": self._each, "died": self._each}

    @property
    @override
    def wholes(self) -> Mapping[str, Shape]:
        return {**super().wholes, "risk": self._each}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        curves: dict[str, Shape] = {"interval": (self.intervals,), "curves": (self.intervals, 2)}
        return {**super().public, **curves}

    @property
    @override
    def kept(self) -> Mapping[str, Shape]:
        return {**super().kept, "deaths": self._each}

    @override
    def _outcome_of(self, table: DataTable) -> Doubles:
        died, time = table.column(self.event), table.column(self.outcome)
        place = self.grid.place(time) + 1
        return np.where(np.isnan(died), np.nan, np.where(died == 1, place, -place))

    @override
    def _class_of(self, outcome: Singles) -> Whole:
        return (outcome > 0).astype(np.int64)

    @override
    def _too_few(self, counted: Doubles, held: float) -> bool:
        return super()._too_few(counted[1:] if counted[0] == 0 else counted, held)

    @override
    def _base(self, counted: Doubles) -> float:
        return 1.0 if self.plan.base_score is None else self.plan.base_score

    def _by_interval(self, place: Whole, held: Any, weight: Doubles | None = None) -> Doubles:
        """Rows, or sums of weights, in each interval from 0: of those that trees are grown on, and others."""
        cell = place + self.intervals * held
        found = np.bincount(cell, weight, minlength=2 * self.intervals).astype(np.float64)
        return found.reshape(self._each)

    @override
    def _first_sums(self, rows: dict[str, Any], public: Arrays, stage: int) -> dict[str, Doubles]:
        found = super()._first_sums(rows, public, stage)
        if stage == 1:
            outcome, held = rows["outcome"], rows["held"]
            place = np.abs(outcome).astype(np.int64) - 1
            found["leavers"] = self._by_interval(place, held)
            found["died"] = self._by_interval(place[outcome > 0], held[outcome > 0])
        return found

    @override
    def _first_step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        found = super()._first_step(public, sums, stage)
        if stage == 1:
            starts = merged(sums["leavers"], max(self.least, 1))
            deaths = np.zeros(self._each)
            deaths[:, : len(starts)] = np.add.reduceat(sums["died"], starts, axis=1)
            place = np.searchsorted(starts, np.arange(self.intervals), side="right") - 1
            found |= {"deaths": deaths, "interval": place.astype(np.float64)}
        return found

    def _intervals_of(self, outcome: Singles, public: Arrays) -> Whole:
        """The merged interval of each row."""
        place = np.clip(public["interval"], 0, self.intervals - 1).astype(np.int64)
        return place[np.abs(outcome).astype(np.int64) - 1]

    @override
    def _around(self, table: DataTable, rows: dict[str, Any], public: Arrays) -> Doubles | None:
        return public["curves"][self._intervals_of(rows["outcome"], public)]

    @override
    def _loss_sums(self, state: BoostedRows, held: Any, public: Arrays) -> dict[str, Doubles]:
        hazard = np.rint(np.exp(state.margins[:, 0].astype(np.float64)) * GRAIN)
        place = self._intervals_of(state.outcome, public)
        return {**super()._loss_sums(state, held, public), "risk": self._by_interval(place, held, hazard)}

    def _at_risk(self, sums: Arrays) -> Doubles:
        return np.cumsum(sums["risk"][:, ::-1], axis=1)[:, ::-1] / GRAIN

    @override
    def _after_losses(self, public: Arrays, sums: Arrays) -> dict[str, Any]:
        deaths, risk = public["deaths"][0], self._at_risk(sums)[0]
        there = deaths > 0
        inverse = np.where(there, 1 / np.where(there, risk, 1.0), 0.0)
        curves = [np.cumsum(deaths * inverse), np.cumsum(deaths * inverse**2)]
        return {"curves": np.stack(curves, axis=1)}

    @override
    def _metric(self, public: Arrays, sums: Arrays) -> Doubles:
        deaths, risk = public["deaths"], self._at_risk(sums)
        logs = np.where(deaths > 0, np.log(np.where(deaths > 0, risk, 1.0)), 0.0)
        total = np.maximum(deaths.sum(axis=1), 1.0)
        found: Doubles = ((deaths * logs).sum(axis=1) - sums["losses"]) / total
        return found
