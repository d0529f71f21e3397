"""A silo's rows while trees are grown: their bins, their margins, and the node of each in the present trees.

All of it follows from the rows and the published trees: what a silo still has from the round before is used,
and made anew where it has not, or where the trees are others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from roundtable.core.analyses.boosted_trees.bin_cuts import bins_of
from roundtable.core.analyses.boosted_trees.boosting_objectives import Boosting
from roundtable.core.analyses.boosted_trees.row_kernels import BinnedRows
from roundtable.core.analyses.boosted_trees.tree_growing import split_parts
from roundtable.core.analyses.exact_sums import Doubles, Singles, Whole


def binned(matrix: Singles, cuts: Doubles, offsets: Whole) -> BinnedRows:
    """Rows [rows, features] as bins, by cuts [features, most]; feature f has as many as its bins but one."""
    columns = (
        bins_of(matrix[:, feature], cuts[feature, : width - 1])
        for feature, width in enumerate(np.diff(offsets))
    )
    return BinnedRows.of(columns, len(matrix), offsets)


@dataclass
class BoostedRows:
    """`margins` [rows, outputs] after `done` times of trees; `nodes` [outputs, rows] in the next ones."""

    rows: BinnedRows
    outcome: Singles
    objective: Boosting
    learning_rate: float
    margins: Singles
    nodes: npt.NDArray[np.int32]
    done: int = 0
    mark: bytes = b""
    grown: Doubles = field(default_factory=lambda: np.zeros(0))
    around: Doubles | None = None
    weights: Singles | None = None
    _pairs: npt.NDArray[np.void] | None = None

    @classmethod
    def of(
        cls,
        rows: BinnedRows,
        outcome: Singles,
        objective: Boosting,
        rate: float,
        base: float,
        weights: Singles | None = None,
    ) -> BoostedRows:
        """Before the first tree, at the margin that `base` gives; rows count by `weights`, or alike."""
        shape = (len(outcome), objective.outputs)
        margins = np.full(shape, objective.margin(base), dtype=np.float32)
        nodes = np.zeros(shape[::-1], dtype=np.int32)
        return cls(rows, outcome, objective, rate, margins, nodes, weights=weights)

    def follows(self, done: int, split: Doubles, weight: Doubles) -> bool:
        """Whether these trees are those of the margins, or go on from them."""
        return self.done <= done and self.mark == _mark(self.done * self.objective.outputs, split, weight)

    def advance(self, done: int, split: Doubles, weight: Doubles) -> None:
        """To where the published trees [trees, nodes] are, of which `done` × outputs are finished."""
        outputs = self.objective.outputs
        while self.done < done:
            now = slice(self.done * outputs, (self.done + 1) * outputs)
            self._descend(split[now])
            rate = np.float32(self.learning_rate)
            for output, leaves in enumerate(weight[now].astype(np.float32)):
                self.margins[:, output] += (leaves * rate)[self.nodes[output]]
            self.nodes[:] = 0
            self.grown = np.zeros(0)
            self._pairs = None
            self.done += 1
        self.mark = _mark(done * outputs, split, weight)
        if done * outputs < len(split):
            self._descend(split[done * outputs : (done + 1) * outputs])

    def see(self, around: Doubles | None) -> None:
        """Takes what gradients need of the public numbers, [rows, any]."""
        before = self.around
        if around is not None and (before is None or not np.array_equal(around, before)):
            self._pairs = None
        self.around = around

    @property
    def pairs(self) -> npt.NDArray[np.void]:
        """Gradients at the margins, `PAIR` [outputs, rows]."""
        if self._pairs is None:
            self._pairs = self.objective.pairs(self.margins, self.outcome, self.around, self.weights)
        return self._pairs

    def _descend(self, split: Doubles) -> None:
        if self.grown.shape == split.shape:
            before = self.grown >= 0
            if not np.array_equal(self.grown[before], split[before]):
                self.nodes[:] = 0
        for output, codes in enumerate(split):
            feature, cut, missing_left = split_parts(codes)
            self.rows.descend(self.nodes[output], feature, cut, missing_left)
        self.grown = split.copy()


def _mark(trees: int, split: Doubles, weight: Doubles) -> bytes:
    return blake3(split[:trees].tobytes() + weight[:trees].tobytes()).digest()


def remembered(derived: dict[Any, Any], key: Any, make: Any) -> Any:
    """What was worked out of a table's rows before, or what `make` gives, for the next time."""
    if key not in derived:
        derived[key] = make()
    return derived[key]
