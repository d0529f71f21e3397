"""The question of gradient-boosted trees: counts, bins, then trees, a few nodes a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.bin_cuts import SKETCH_ROUNDS
from roundtable.core.analyses.boosted_trees.boosted_rows import BoostedRows, binned, remembered
from roundtable.core.analyses.boosted_trees.boosting_objectives import (
    GRAIN,
    Boosting,
    LogisticLoss,
    PoissonLoss,
    SoftmaxLoss,
    SquaredError,
)
from roundtable.core.analyses.boosted_trees.feature_bins import BoostingPlan, FeatureBins
from roundtable.core.analyses.boosted_trees.grown_trees import grown_trees
from roundtable.core.analyses.boosted_trees.row_kernels import AskedNodes, NodeHistograms
from roundtable.core.analyses.boosted_trees.tree_growing import Grower
from roundtable.core.analyses.boosted_trees.xgboost_model import nine_digits
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape, Singles, Sums, Whole
from roundtable.core.analyses.question import DONE, TOO_FEW, Answer, Question
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

GROWING, LAST_LOSS, RISK = 100, 101, 102
_VALUES_A_ROUND = 1 << 21
_MOST_SLOTS = 8
_HALF = 0.5
_LEAST_MEAN = 1e-6


class BoostedTrees(Question):
    """Gradient-boosted trees of an outcome: squared error of a number, logistic loss of a category of two
    values, multinomial loss of one of more. Rows without an outcome are left out."""

    ask: ClassVar[str] = "boosted_trees"
    small_cells: bool = True
    begins: ClassVar[int] = GROWING
    """The stage with which every round of boosting begins, and in which losses are told."""

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        plan: BoostingPlan,
    ) -> None:
        super().__init__(columns, least, title)
        self.outcome = outcome
        self.on = on
        self.plan = plan
        self.objective = self._weighted(self._objective())
        self.bins = FeatureBins.of(self, on, plan, max(least, 1))
        self.offsets = self.bins.offsets

    @cached_property
    def grower(self) -> Grower:
        """How the coordinator grows the trees."""
        growth, outputs = self.plan.growth, self.objective.outputs
        each = int(self.offsets[-1]) * (self.digits.count + self.digits.whole * self._channels)
        most = outputs * 2 ** max(0, growth.max_depth - 2)
        slots = max(1, min(most, _MOST_SLOTS * outputs, _VALUES_A_ROUND // each))
        scale = np.array([*(unit / GRAIN for unit in self.objective.units), 1.0])
        return Grower(self.offsets, growth, self.least, self.plan.rounds, outputs, slots, scale)

    def _objective(self) -> Boosting:
        if self.plan.counts:
            column = self.number(self.outcome)
            if (column.least or 0.0) < 0:
                raise ConfigError(
                    f"{self.title}: counts are from 0 on: set least = 0 in [columns.{self.outcome}]"
                )
            return PoissonLoss.of(column.half)
        if self.described(self.outcome).kind == "number":
            return SquaredError.of(self.number(self.outcome).half)
        values = len(self.category(self.outcome).values)
        if values == 2:
            return LogisticLoss(classes=2)
        return SoftmaxLoss(outputs=values, classes=values)

    def _weighted(self, objective: Boosting) -> Boosting:
        if self.plan.weights is None:
            return objective
        name, column = self.plan.weights, self.number(self.plan.weights)
        if (column.least or 0.0) < 0 or not column.most:
            raise ConfigError(f"{self.title}: weights are from 0 on: set least = 0 in [columns.{name}]")
        return replace(objective, weight_unit=2.0 ** math.ceil(math.log2(column.most)))

    @property
    def _channels(self) -> int:
        """Of a histogram, beside the rows."""
        return 1 if self.objective.constant_hessian and self.plan.weights is None else 2

    @property
    def _first_stages(self) -> int:
        """Rounds between the counts and the trees."""
        if self.bins.sketched:
            return SKETCH_ROUNDS
        return int(self._asks_mean)

    @property
    def _asks_mean(self) -> bool:
        """Whether trees begin with the outcome's mean."""
        return self.plan.base_score is None and self.objective.classes == 1

    @property
    @override
    def rounds(self) -> int:
        return 2 + self._first_stages + self.plan.rounds * self.grower.rounds

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.told, *self.on)))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome, *([self.plan.weights] if self.plan.weights is not None else []))

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        found: dict[str, Shape] = {
            "rows": (self.objective.classes,),
            "held": (1,),
        }
        return found | ({"cells": self.bins.cells} if self.bins.sketched else {})

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        weighed: dict[str, Shape] = {} if self.plan.weights is None else {"weighed": (2,)}
        return {"first": (1,), "losses": (2,), **weighed}

    @property
    @override
    def histograms(self) -> Mapping[str, Shape]:
        return {"histograms": (1 + self._channels, self.grower.slots, int(self.offsets[-1]))}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {
            "rows": (self.objective.classes,),
            "held": (1,),
            "cuts": (len(self.on), self.bins.places),
            "base": (1,),
            "losses": (self.plan.rounds + 1, 2),
            "best": (1,),
            **self.grower.public,
        }

    @property
    @override
    def kept(self) -> Mapping[str, Shape]:
        return self.grower.kept

    def _rows_of(self, table: DataTable) -> dict[str, Any]:
        """The rows with an outcome and a weight above 0: features, outcome and weights as float32, and which
        of them are held out."""
        named = (self.title, self.outcome, self.on, self.plan.held_out, self.plan.seed, self.plan.weights)
        key = ("boosted rows", *named)

        def make() -> dict[str, Any]:
            outcome = self._outcome_of(table)
            whole, weights = ~np.isnan(outcome), None
            if self.plan.weights is not None:
                whole &= table.column(self.plan.weights) > 0
                weights = table.column(self.plan.weights)[whole].astype(np.float32)
            return {
                "features": table.matrix(self.on)[whole].astype(np.float32),
                "outcome": outcome[whole].astype(np.float32),
                "held": self._held_of(table)[whole],
                "weights": weights,
            }

        found: dict[str, Any] = remembered(table.derived, key, make)
        return found

    def _outcome_of(self, table: DataTable) -> Doubles:
        return table.column(self.outcome)

    def _held_of(self, table: DataTable) -> Any:
        """Which rows of a table are held out."""
        return np.random.default_rng(self.plan.seed).random(len(table)) < self.plan.held_out

    def _class_of(self, outcome: Singles) -> Whole:
        """The place in the first counts of each row."""
        return outcome.astype(np.int64) * (self.objective.classes > 1)

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> Sums:
        rows = self._rows_of(table)
        outcome, held = rows["outcome"], rows["held"]
        if stage == 0:
            counted = np.bincount(self._class_of(outcome[~held]), minlength=self.objective.classes)
            return {"rows": counted.astype(np.float64), "held": np.array([float(held.sum())])}
        if stage < GROWING:
            return self._first_sums(rows, public, stage)
        state = self._state(table, rows, public)
        asked = public["asked"].astype(np.int64)
        losses = self._loss_sums(state, held, public) if self._tells_losses(stage, asked) else {}
        if stage != GROWING:
            return losses
        return {**losses, "histograms": self._histograms(state, held, asked)}

    def _tells_losses(self, stage: int, asked: Whole) -> bool:
        return stage != GROWING or (self.begins == GROWING and bool((asked == 0).any()))

    def _loss_sums(self, state: BoostedRows, held: Any, public: Arrays) -> dict[str, Doubles]:
        parts: Any = (~held, held) if held.any() else (slice(None), slice(0))
        losses = [self.objective.loss(state.margins[part], state.outcome[part]) for part in parts]
        if state.weights is None:
            return {"losses": np.array([each.sum() for each in losses])}
        weights = state.weights.astype(np.float64) / self.objective.weight_unit
        own = [weights[part] for part in parts]
        weighed = [(each * by).sum() for each, by in zip(losses, own, strict=True)]
        return {"losses": np.array(weighed), "weighed": np.array([by.sum() for by in own])}

    def _first_sums(self, rows: dict[str, Any], public: Arrays, stage: int) -> dict[str, Doubles]:
        train = ~rows["held"]
        found = {}
        if self.bins.sketched:
            found["cells"] = self.bins.count(rows["features"][train], public["cuts"])
        if stage == 1 and self._asks_mean:
            column = self.number(self.outcome)
            away = rows["outcome"][train].astype(np.float64) - column.middle
            found["first"] = np.array([(away / column.half).sum()])
        return found

    def _state(self, table: DataTable, rows: dict[str, Any], public: Arrays) -> BoostedRows:
        self.grower.check(public)
        cuts, base = public["cuts"], float(public["base"][0])
        place = ("bins", self.on, self.title)
        known, bins = table.derived.get(place, (None, None))
        if known is None or not np.array_equal(known, cuts):
            bins = binned(rows["features"], cuts, self.offsets)
            table.derived[place] = (cuts, bins)
        done, split, weight = int(public["done"][0]), public["split"], public["weight"]
        rate = self.plan.growth.learning_rate
        key = ("boosted", self.title, self.outcome, self.on, rate, base)
        state = table.derived.get(key)
        if not (
            isinstance(state, BoostedRows)
            and state.rows is bins
            and state.outcome is rows["outcome"]
            and state.weights is rows["weights"]
            and state.objective == self.objective
            and state.follows(done, split, weight)
        ):
            state = BoostedRows.of(bins, rows["outcome"], self.objective, rate, base, rows["weights"])
        state.advance(done, split, weight)
        state.see(self._around(table, rows, public))
        table.derived[key] = state
        return state

    def _around(self, table: DataTable, rows: dict[str, Any], public: Arrays) -> Doubles | None:
        """What a row's gradient takes beside its margin and outcome, [rows, any]; None: nothing."""
        return None

    def _histograms(self, state: BoostedRows, held: Any, asked: Whole) -> NodeHistograms:
        nodes, found = self.grower.nodes, []
        for output in range(self.objective.outputs):
            slots = np.flatnonzero((asked >= 0) & (asked // nodes == output))
            if slots.size:
                where = state.nodes[output]
                if held.any():
                    where = np.where(held, np.int32(nodes), where)
                found.append(AskedNodes(where, state.pairs[output], asked[slots] % nodes, slots))
        return NodeHistograms(state.rows, self.grower.slots, self._channels, found)

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            return self._begin(sums)
        if stage < GROWING:
            return self._first_step(public, sums, stage)
        changed: dict[str, Any] = {}
        before = int(public["done"][0])
        if self._tells_losses(stage, public["asked"].astype(np.int64)):
            changed = self._with_losses(public, sums)
            if stage == LAST_LOSS or self._stalled(changed["losses"], before):
                return {**changed, "stage": DONE, "asked": -1.0}
        if stage != GROWING:
            return {**changed, **self._after_losses(public, sums), "stage": GROWING}
        rows, gradients, *hessians = sums["histograms"]
        found = {}
        for slot in np.flatnonzero(public["asked"] >= 0).tolist():
            hessian = hessians[0][slot] if hessians else rows[slot] * GRAIN
            found[slot] = np.stack([gradients[slot], hessian, rows[slot]])
        grown = self.grower.step(public, found)
        if "done" not in grown:
            return {**changed, **grown, "stage": GROWING}
        last = before + 1 == self.plan.rounds
        return {**changed, **grown, "stage": LAST_LOSS if last else self.begins}

    def _after_losses(self, public: Arrays, sums: Arrays) -> dict[str, Any]:
        """What changes where losses are told in a stage of their own."""
        return {}

    def _too_few(self, counted: Doubles, held: float) -> bool:
        least = max(self.least, 1)
        return bool((counted < least).any()) or (self.plan.held_out > 0 and held < least)

    def _base(self, counted: Doubles) -> float:
        """The prediction before the first tree, as far as these counts tell it."""
        if self.plan.base_score is not None:
            return self.plan.base_score
        return nine_digits(float(counted[1] / counted.sum())) if self.objective.classes == 2 else _HALF

    def _begin(self, sums: Arrays) -> dict[str, Any]:
        counted, held = sums["rows"], sums["held"]
        found: dict[str, Any] = {"rows": self.hide(counted), "held": self.hide(held)}
        if self._too_few(counted, float(held[0])):
            return {**found, "stage": -float(TOO_FEW)}
        found["cuts"] = self.bins.begin()
        found["base"] = self._base(counted)
        return {**found, **self._go_on(1)}

    def _go_on(self, stage: int) -> dict[str, Any]:
        if stage <= self._first_stages:
            return {"stage": float(stage)}
        return {"stage": float(self.begins), **self.grower.start()}

    def _first_step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if stage == 1 and self._asks_mean:
            column = self.number(self.outcome)
            mean = column.middle + column.half * sums["first"][0] / public["rows"].sum()
            found["base"] = nine_digits(max(float(mean), _LEAST_MEAN) if self.plan.counts else float(mean))
        if self.bins.sketched:
            found["cuts"] = self.bins.refine(public["cuts"], sums["cells"], stage == SKETCH_ROUNDS)
        return {**found, **self._go_on(stage + 1)}

    def _with_losses(self, public: Arrays, sums: Arrays) -> dict[str, Any]:
        done = int(public["done"][0])
        losses = public["losses"].copy()
        losses[done] = self._metric(public, sums)
        best = done
        if self.plan.patience and done:
            # As xgboost counts: what it was before the first tree cannot be the best.
            best = 1 + self._lowest(losses[1 : done + 1, 1])
        return {"losses": losses, "best": float(best)}

    @property
    def _metric_name(self) -> str:
        return self.objective.metric

    def _metric(self, public: Arrays, sums: Arrays) -> Doubles:
        """The metric of the rows that trees are grown on, and of those held out."""
        rows = np.array([public["rows"].sum(), max(0.0, public["held"][0])])
        losses = sums["losses"]
        if self.plan.weights is not None:
            losses = losses * rows / np.where(sums["weighed"] > 0, sums["weighed"], 1.0)
        return self.objective.told(losses, rows)

    def _stalled(self, losses: Doubles, done: int) -> bool:
        """Whether the held-out loss has been no lower for as many trees as the study waits."""
        if not self.plan.patience:
            return False
        seen = losses[1 : done + 1, 1]
        return seen.size > 0 and seen.size - 1 - self._lowest(seen) >= self.plan.patience

    def _lowest(self, losses: Doubles) -> int:
        return int((-losses if self.objective.rising else losses).argmin())

    @override
    def answer(self, public: Arrays) -> Answer:
        return grown_trees(
            self.title, self.ask, self.on, self.plan, self.objective, self._metric_name, public
        )
