"""The features of boosted trees and their bins, round by round until all cuts are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roundtable.core.analyses.boosted_trees.bin_cuts import (
    TOP,
    cells_for,
    count_cells,
    even_cuts,
    even_edges,
    given_cuts,
    quantile_cuts,
    refined,
)
from roundtable.core.analyses.boosted_trees.split_choice import Growth
from roundtable.core.analyses.exact_sums import Doubles, Shape, Singles, Whole
from roundtable.core.analyses.question import Question
from roundtable.core.errors import ConfigError


@dataclass(frozen=True)
class BoostingPlan:
    """What a study asks of boosted trees, beside outcome and features. `edges`: of a column, its cuts;
    `counts`: whether a number is a count, with Poisson's likelihood; `weights`: the column of rows'
    weights."""

    rounds: int
    growth: Growth
    bins: int = 64
    cuts: str = "quantiles"
    edges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    held_out: float = 0.0
    patience: int = 0
    base_score: float | None = None
    seed: int = 0
    counts: bool = False
    weights: str | None = None


@dataclass(frozen=True)
class FeatureBins:
    """Features by their places. `known`: the cuts of those that need no sketch; `ranges`: least and most of
    the others; `offsets` [features + 1]: where the bins of each begin, the last of them of missing values.
    """

    known: Mapping[int, Doubles]
    ranges: Mapping[int, tuple[float, float]]
    bins: int
    least: int
    offsets: Whole

    @classmethod
    def of(cls, question: Question, on: Sequence[str], plan: BoostingPlan, least: int) -> FeatureBins:
        """For these columns. ConfigError for a number without a range, and for edges of a category."""
        known: dict[int, Doubles] = {}
        ranges = {}
        for place, name in enumerate(on):
            if question.described(name).kind == "category":
                if name in plan.edges:
                    raise ConfigError(
                        f"{question.title}: edges are of numbers, and {name!r} is a category, with a bin for "
                        "each value: leave its edges out"
                    )
                known[place] = np.array([*np.arange(1.0, len(question.category(name).values)), TOP])
                continue
            column = question.number(name)
            low, high = column.middle - column.half, column.middle + column.half
            if name in plan.edges:
                known[place] = given_cuts(plan.edges[name], high)
            elif plan.cuts == "equal":
                known[place] = even_cuts(low, high, plan.bins)
            else:
                ranges[place] = (low, high)
        widths = [len(known[place]) if place in known else plan.bins for place in range(len(on))]
        offsets = np.concatenate([[0], np.cumsum(np.array(widths) + 1)]).astype(np.int64)
        return cls(known, ranges, plan.bins, least, offsets)

    @property
    def sketched(self) -> bool:
        """Whether there are columns whose quantiles are asked for."""
        return bool(self.ranges)

    @property
    def cells(self) -> Shape:
        """The shape of a sketch: columns, and cells of each."""
        return (len(self.ranges), cells_for(self.bins))

    @property
    def places(self) -> int:
        """Cuts or edges that a feature has at most."""
        widest = int(np.diff(self.offsets).max()) - 1
        return max(widest, self.cells[1] + 1) if self.sketched else widest

    def begin(self) -> Doubles:
        """Cuts [features, places], and in their place the first edges of a sketch."""
        cuts = np.full((len(self.offsets) - 1, self.places), TOP)
        for place, known in self.known.items():
            cuts[place, : len(known)] = known
        for place, (low, high) in self.ranges.items():
            cuts[place, : self.cells[1] + 1] = even_edges(low, high, self.cells[1])
        return cuts

    def count(self, features: Singles, cuts: Doubles) -> Doubles:
        """A silo's rows in the cells of each sketch."""
        edges = cuts[:, : self.cells[1] + 1]
        return np.stack([count_cells(features[:, place], edges[place]) for place in self.ranges])

    def refine(self, cuts: Doubles, counted: Doubles, last: bool) -> Doubles:
        """The next edges of each sketch; in the last round the cuts."""
        after = cuts.copy()
        for place, own in zip(self.ranges, counted, strict=True):
            edges = cuts[place, : self.cells[1] + 1]
            if last:
                found = quantile_cuts(edges, own, self.least, self.bins)
                after[place] = TOP
            else:
                found = refined(edges, own, self.least)
            after[place, : len(found)] = found
        return after
