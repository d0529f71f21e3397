"""Gradient-boosted trees under noise: each level of a tree, and its leaves, are one release.

A row is in one node of each level and in one bin of each feature there, so it changes the summed gradients of
a level by √features times its own, whatever the number of nodes and bins; and the sums of a tree's leaves by
its own alone. Rows' gradients and Hessians are bounded, or are cut to a bound: |g| ≤ 1 and h ≤ 1/4 of the
logistic loss, √2 and √(1 − 1/K) over the K outputs of the multinomial one (Σ (2p(1−p))² ≤ Σ p(1−p)), and half
of the outcome's range and 1 of the squared error. Splits that are drawn at random ask for no level
(Maddock, Cormode, Wang, Maple & Jha 2022, Federated Boosted Decision Trees with Differential Privacy, 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.bin_cuts import quantile_cuts
from roundtable.core.analyses.boosted_trees.boosted_rows import BoostedRows, binned, remembered
from roundtable.core.analyses.boosted_trees.boosting_objectives import (
    GRAIN,
    Boosting,
    LogisticLoss,
    SoftmaxLoss,
)
from roundtable.core.analyses.boosted_trees.bounded_trees import (
    RESIDUAL_SPREAD,
    BoundedLoss,
    agreeing,
    reached_nodes,
    shrunk,
)
from roundtable.core.analyses.boosted_trees.feature_bins import BoostingPlan, FeatureBins
from roundtable.core.analyses.boosted_trees.row_kernels import AskedNodes, NodeHistograms
from roundtable.core.analyses.boosted_trees.split_choice import FAR, NodeSplits
from roundtable.core.analyses.boosted_trees.tree_growing import NONE, check_trees, split_code, split_parts
from roundtable.core.analyses.boosted_trees.xgboost_model import (
    IMPORTANCE_HEADER,
    importance_of,
    importance_rows,
    xgboost_model,
)
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.noisy.noisy_quantiles import rising
from roundtable.core.analyses.noisy.noisy_question import Q95, NoisyQuestion, SumBlock
from roundtable.core.analyses.question import Answer
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_LARGEST = 1e30
_EVERY_ROW = -(1 << 62)
_NO_SPLIT = (
    "beside the noise no split gains anything: a higher epsilon, fewer rounds, bins or features, or splits = "
    '"random" would leave something'
)


class NoisyTrees(NoisyQuestion):
    """Boosted trees of a number (squared error) or of a category. Of the plan held-out rows, weights, counts
    and monotone features are not used. `drawn`: splits are drawn at random, before anything is asked."""

    ask: ClassVar[str] = "boosted_trees"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        title: str,
        outcome: str,
        on: tuple[str, ...],
        plan: BoostingPlan,
        drawn: bool,
    ) -> None:
        super().__init__(columns, title)
        self.outcome = outcome
        self.on = on
        self.plan = plan
        self.drawn = drawn
        self.middle = 0.0
        self.loss = self._loss()
        self.bins = FeatureBins.of(self, on, plan, 1)
        self.offsets = self.bins.offsets
        self.nodes = plan.growth.nodes
        self._levels = 0 if drawn else plan.growth.max_depth

    def _loss(self) -> BoundedLoss:
        if self.described(self.outcome).kind == "number":
            column = self.number(self.outcome)
            self.middle = column.middle
            return BoundedLoss.bounding(Boosting(), column.half)
        values = len(self.category(self.outcome).values)
        of = LogisticLoss(classes=2) if values == 2 else SoftmaxLoss(outputs=values, classes=values)
        return BoundedLoss.bounding(of, 1.0)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.outcome, *self.on)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome,)

    @cached_property
    def _blocks(self) -> dict[str, SumBlock]:
        loss, outputs, each = self.loss, self.loss.outputs, self._levels + 1
        made = {"rows": SumBlock((loss.classes,), 1.0)}
        if loss.classes == 1:
            made["first"] = SumBlock((1,), 1.0)
        if self.bins.sketched:
            made["cells"] = SumBlock(self.bins.cells, math.sqrt(len(self.bins.ranges)))
        last = 1 + self.plan.rounds * each
        for level in range(self._levels):
            shape = (outputs, 2**level, int(self.offsets[-1]))
            for name, reach in (("gradients", loss.gradient), ("hessians", loss.hessian)):
                made[f"{name}{level}"] = SumBlock(
                    shape, reach * math.sqrt(len(self.on)), range(1 + level, last, each)
                )
        for name, reach in (("leaves", loss.gradient), ("covers", loss.hessian)):
            made[name] = SumBlock((outputs, self.nodes), reach, range(each, last, each))
        return made

    @property
    @override
    def blocks(self) -> Mapping[str, SumBlock]:
        return self._blocks

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        trees = (self.plan.rounds * self.loss.outputs, self.nodes)
        tree = dict.fromkeys(("split", "weight", "gain", "hessian"), trees)
        return {
            "rows": (self.loss.classes,),
            "base": (1,),
            "cuts": (len(self.on), self.bins.places),
            **tree,
        }

    def _place(self, stage: int) -> tuple[int, int]:
        """(tree, level) of a stage behind the first; the level behind the last is that of leaves."""
        return divmod(stage - 1, self._levels + 1)

    @override
    def added_at(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        rows = self._rows_of(table)
        if stage == 0:
            return self._first(rows)
        tree, level = self._place(stage)
        check_trees(public["split"], len(self.on))
        state = self._state(table, rows, public, tree)
        pairs, nodes = state.pairs, state.nodes
        if level == self._levels:
            sums = np.zeros((2, self.loss.outputs, self.nodes))
            for output, own in enumerate(pairs):
                for channel, name in enumerate(("gradient", "hessian")):
                    sums[channel, output] = np.bincount(
                        nodes[output], own[name].astype(np.float64), self.nodes
                    )
            return {"leaves": sums[0] / GRAIN, "covers": sums[1] / GRAIN}
        asked = np.arange(2**level - 1, 2 ** (level + 1) - 1)
        wanted = [
            AskedNodes(nodes[output], own, asked, output * 2**level + np.arange(2**level))
            for output, own in enumerate(pairs)
        ]
        found = NodeHistograms(state.rows, self.loss.outputs * 2**level, 2, wanted).whole / GRAIN
        _, gradients, hessians = found.reshape(3, self.loss.outputs, 2**level, -1)
        return {f"gradients{level}": gradients, f"hessians{level}": hessians}

    def _rows_of(self, table: DataTable) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            outcome = table.column(self.outcome)
            column = self.columns[self.outcome]
            if column.kind == "number":
                outcome = np.clip(outcome, column.least, column.most)
            whole = ~np.isnan(outcome)
            features = table.matrix(self.on)[whole]
            for place, name in enumerate(self.on):
                if self.columns[name].kind == "number":
                    span = self.number(name)
                    features[:, place] = np.clip(features[:, place], span.least, span.most)
            return {
                "features": features.astype(np.float32),
                "outcome": outcome[whole].astype(np.float32),
            }

        found: dict[str, Any] = remembered(table.derived, ("noisy rows", self.title), make)
        return found

    def _first(self, rows: dict[str, Any]) -> dict[str, Doubles]:
        outcome = rows["outcome"]
        counted = np.bincount(outcome.astype(np.int64) * (self.loss.classes > 1), minlength=self.loss.classes)
        found = {"rows": counted.astype(np.float64)}
        if self.loss.classes == 1:
            scaled = (outcome.astype(np.float64) - self.middle) / self.loss.scale
            found["first"] = np.array([np.clip(scaled, -1.0, 1.0).sum()])
        if self.bins.sketched:
            found["cells"] = self.bins.count(rows["features"], self.bins.begin())
        return found

    def _state(self, table: DataTable, rows: dict[str, Any], public: Arrays, tree: int) -> BoostedRows:
        # Whatever it is that comes, gradients are cut to their bounds; beyond these it is no number any more.
        cuts, base = public["cuts"], float(np.clip(public["base"][0], -_LARGEST, _LARGEST))
        bins = remembered(
            table.derived,
            ("noisy bins", self.title, cuts.tobytes()),
            lambda: binned(rows["features"], cuts, self.offsets),
        )
        split, weight = public["split"], np.clip(public["weight"], -_LARGEST, _LARGEST)
        key = ("noisy trees", self.title)
        state = table.derived.get(key)
        if not (
            isinstance(state, tuple)
            and state[0].rows is bins
            and state[1] == base
            and state[0].follows(tree, split, weight)
        ):
            rate = self.plan.growth.learning_rate
            with np.errstate(all="ignore"):
                state = BoostedRows.of(bins, rows["outcome"], self.loss, rate, base), base
            table.derived[key] = state
        found: BoostedRows = state[0]
        found.advance(tree, split, weight)
        return found

    @override
    def follow(self, public: Arrays, released: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            return self._begin(public, released)
        tree, level = self._place(stage)
        own = slice(tree * self.loss.outputs, (tree + 1) * self.loss.outputs)
        if level == self._levels:
            return self._leaves(public, released, own)
        split = public["split"].copy()
        split[own] = self._split(public, split[own], released, level)
        return {"split": split}

    def _begin(self, public: Arrays, released: Arrays) -> dict[str, Any]:
        counted, cuts = released["rows"], self.bins.begin()
        if self.bins.sketched:
            least = max(1, round(2 * self.spread("cells", self.silos(public))))
            edges = cuts.copy()
            for place, cells in zip(self.bins.ranges, released["cells"], strict=True):
                below = np.maximum(rising(np.cumsum(cells)), 0.0)
                own = np.diff(below, prepend=0.0)
                found = quantile_cuts(edges[place, : len(own) + 1], own, least, self.bins.bins)
                cuts[place] = cuts[place].max() if not len(found) else found[-1]
                cuts[place, : len(found)] = found
        shape = self.public["split"]
        split = self._drawn(cuts) if self.drawn else np.full(shape, NONE)
        base = self.plan.base_score
        if base is None:
            base = self._base(counted, released)
        return {"rows": counted, "base": float(np.float32(f"{base:.8e}")), "cuts": cuts, "split": split}

    def _base(self, counted: Doubles, released: Arrays) -> float:
        n = max(float(counted.sum()), 1.0)
        if self.loss.classes == 1:
            mean = min(max(float(released["first"][0]) / n, -1.0), 1.0)
            return self.middle + self.loss.scale * mean
        if self.loss.classes > 2:
            return 0.5
        return min(max(float(counted[1]) / n, 0.01), 0.99)

    def _drawn(self, cuts: Doubles) -> Doubles:
        """Splits of all trees, down to the last level, without a look at any row."""
        draw = np.random.default_rng((self.plan.seed, 1))
        inner = [
            int((cuts[place, : width - 1] < cuts[place].max()).sum())
            for place, width in enumerate(np.diff(self.offsets))
        ]
        split = np.full(self.public["split"], NONE)
        for tree in split:
            for node in range(self.nodes // 2):
                allowed = self._allowed(tree, node) & (np.array(inner) > 0)
                if allowed.any():
                    feature = int(draw.choice(np.flatnonzero(allowed)))
                    tree[node] = split_code(
                        feature, int(draw.integers(inner[feature])), bool(draw.integers(2))
                    )
        return split

    def _allowed(self, tree: Doubles, node: int) -> npt.NDArray[np.bool_]:
        path = []
        while node:
            node = (node - 1) // 2
            path.append(int(split_parts(tree[[node]])[0][0]))
        return self.plan.growth.allowed([each for each in path if each >= 0], len(self.on))

    def _split(self, public: Arrays, trees: Doubles, released: Arrays, level: int) -> Doubles:
        silos, first = self.silos(public), 2**level - 1
        noises = [self.spread(f"{name}{level}", silos) for name in ("gradients", "hessians")]
        sums = np.stack([released[f"{name}{level}"] for name in ("gradients", "hessians")], axis=-1)
        sums = agreeing(sums, self.offsets)
        side = math.sqrt(float(np.diff(self.offsets).max())) / 2
        growth = replace(
            self.plan.growth,
            reg_lambda=self.plan.growth.reg_lambda + side * noises[0],
            min_child_weight=max(self.plan.growth.min_child_weight, 2 * side * noises[1]),
        )
        finder = NodeSplits(self.offsets, growth, _EVERY_ROW, np.ones(3))
        bounds = np.array([-FAR, FAR])
        missing = self.offsets[1:] - 1
        after = trees.copy()
        for output, tree in enumerate(after):
            for place in range(2**level):
                node = first + place
                if node and tree[(node - 1) // 2] < 0:
                    continue
                histogram = np.zeros((3, sums.shape[2]))
                histogram[:2] = sums[output, place].T
                # Missing values that the noise may have made have no side of their own.
                histogram[2, missing] = sums[output, place, missing, 1] > 3 * noises[1]
                chosen = finder.best(histogram, bounds, self._allowed(tree, node))
                if chosen is not None:
                    tree[node] = split_code(chosen.feature, chosen.cut, chosen.missing_left)
        return after

    def _leaves(self, public: Arrays, released: Arrays, own: slice) -> dict[str, Any]:
        silos, growth = self.silos(public), self.plan.growth
        noise, blur = self.spread("leaves", silos), self.spread("covers", silos)
        made = {name: public[name].copy() for name in ("weight", "gain", "hessian")}
        for output, tree in enumerate(range(own.start, own.stop)):
            splits = public["split"][tree] >= 0
            sums = np.stack([released["leaves"][output] * self.loss.scale, released["covers"][output]])
            reached = reached_nodes(splits)
            sums[:, splits | ~reached] = 0.0
            variance = np.where(splits | ~reached, 0.0, (noise * self.loss.scale) ** 2)
            for node in range(self.nodes // 2 - 1, -1, -1):
                if splits[node]:
                    below = [2 * node + 1, 2 * node + 2]
                    sums[:, node] = sums[:, below].sum(axis=1)
                    variance[node] = variance[below].sum()
            unit = 1.0 if self.loss.classes > 1 else RESIDUAL_SPREAD * self.loss.scale
            weight, gain = shrunk(growth, sums, variance / unit**2, blur)
            made["weight"][tree] = np.where(reached, weight, 0.0)
            made["hessian"][tree] = np.where(reached, np.maximum(sums[1], 0.0), 0.0)
            made["gain"][tree] = 0.0
            for node in map(int, np.flatnonzero(splits)):
                more = gain[2 * node + 1] + gain[2 * node + 2] - gain[node]
                made["gain"][tree, node] = max(float(more), 0.0)
        return made

    @override
    def answer(self, public: Arrays) -> Answer:
        silos, outputs = self.silos(public), self.loss.outputs
        growth, counted = self.plan.growth, public["rows"]
        if (public["split"] < 0).all():
            return Answer(self.title, self.ask, why=_NO_SPLIT)
        noise = self.spread("rows", silos) * math.sqrt(len(counted))
        n = float(counted.sum())
        model = xgboost_model(self.on, self.loss.of, growth.learning_rate, public, self.plan.rounds)
        importance = importance_of(self.on, public, self.plan.rounds * outputs)
        values: dict[str, Any] = {
            "n": n,
            "n_interval": [max(0.0, n - Q95 * noise), max(0.0, n + Q95 * noise)],
            "rounds": self.plan.rounds,
            "objective": self.loss.of.name,
            "base_score": float(public["base"][0]),
            "importance": importance,
            "features": list(self.on),
            "splits": "random" if self.drawn else "best",
        }
        notes = [
            f"{max(0, round(n))} ± {Q95 * noise:.4g} rows; {self.plan.rounds * outputs} trees of "
            f"{self.loss.of.name}, splits {'drawn at random' if self.drawn else 'chosen by noisy sums'}",
            f"noise of a leaf's gradients: ± {Q95 * self.spread('leaves', silos):.4g} of rows' bound",
            "no loss is told: it would be of the rows, and cost as much as a tree",
        ]
        rows = importance_rows(importance)
        return Answer(self.title, self.ask, IMPORTANCE_HEADER, rows, values, notes=notes, model=model)
