"""What trees are boosted towards that rank a query's rows: LambdaMART's gradients, as xgboost computes them.

Rows of a query that differ in relevance are pairs. With the rows in the order of their margins (equal ones as
they lie), each of the first `top` is paired with all others. A pair with scores s, the more relevant first,
pushes that row up and the other down by λ = (1 − σ(s₁ − s₂)) Δ, with Hessian 2 σ (1 − σ) Δ. Δ is 1, or what
NDCG changes where both change places (Burges 2010, From RankNet to LambdaRank to LambdaMART, sections 3 and
7). As xgboost has it, Δ is divided by |s₁ − s₂| + 0.01 once scores differ, and a query's sums are scaled by
log₂(1 + Λ) / Λ, with Λ the sum of 2 λ over its pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.boosting_objectives import Boosting
from roundtable.core.analyses.exact_sums import Doubles, Singles, Whole
from roundtable.core.errors import TaskError

MOST_RELEVANT = 31
"""The highest relevance, whose gain is 2^31 − 1."""
MOST_PAIRS = 1 << 22
"""Pairs of one query at most, which lie in memory together."""
_AT_ONCE = 1 << 18
_APART = 0.01
_LEAST = 1e-16
_FARTHEST = np.float32(88.7)


def queries_of_size(queries: Doubles) -> Iterator[Whole]:
    """Rows of queries [rows] that have equally many, [queries, rows of each], in the order of the rows."""
    order = np.argsort(queries, kind="stable")
    starts = np.flatnonzero(np.diff(queries[order], prepend=np.nan) != 0)
    sizes = np.diff(starts, append=len(order))
    for size in np.unique(sizes):
        yield order[starts[sizes == size][:, None] + np.arange(size)]


def discounts(rows: int) -> Doubles:
    """Of so many places from the first on, 1 / log₂(place + 1)."""
    found: Doubles = 1.0 / np.log2(np.arange(rows) + 2.0)
    return found


def by_margin(margins: Singles) -> Whole:
    """The order [queries, rows] of falling margins; equal ones stay as they lie."""
    order: Whole = np.argsort(-margins, axis=1, kind="stable")
    return order


def ideal_gains(relevance: Singles, top: int) -> Doubles:
    """DCG [queries] of the best order of the rows, of its first places."""
    best = -np.sort(-relevance, axis=1)[:, :top].astype(np.float64)
    found: Doubles = (np.exp2(best) - 1.0) @ discounts(best.shape[1])
    return found


def ndcg(margins: Singles, relevance: Singles, queries: Doubles, top: int) -> float:
    """The sum over queries of NDCG at `top`, of rows with margins and relevance [rows]; 1 of a query in which
    nothing is relevant."""
    total = 0.0
    for rows in queries_of_size(queries):
        order, own = by_margin(margins[rows]), relevance[rows]
        ranked = np.take_along_axis(own, order, axis=1)[:, :top].astype(np.float64)
        reached = (np.exp2(ranked) - 1.0) @ discounts(ranked.shape[1])
        ideal = ideal_gains(own, top)
        total += float(np.where(ideal > 0, reached / np.where(ideal > 0, ideal, 1.0), 1.0).sum())
    return total


@dataclass(frozen=True)
class PairwiseRanking(Boosting):
    """RankNet's loss of each pair; what is `around` a row is its query."""

    top: int = 32

    name: ClassVar[str] = "rank:pairwise"
    metric: ClassVar[str] = "ndcg"
    rising: ClassVar[bool] = True
    constant_hessian: ClassVar[bool] = False

    @override
    def gradients(
        self, margins: Singles, outcome: Singles, around: Doubles | None = None
    ) -> tuple[Singles, Singles]:
        assert around is not None
        scores = margins[:, 0]
        found = np.zeros((2, len(scores)), dtype=np.float32)
        for rows in queries_of_size(around[:, 0]):
            size = rows.shape[1]
            pairs = min(self.top, size) * size
            if pairs > MOST_PAIRS:
                raise TaskError(
                    f"a query has so many rows that its first {self.top:,}, paired with all others, make "
                    f"more than {MOST_PAIRS:,} pairs: the study can set a smaller top"
                )
            for some in np.array_split(rows, min(len(rows), -(-len(rows) * pairs // _AT_ONCE))):
                order = by_margin(scores[some])
                ranked = np.take_along_axis(some, order, axis=1)
                own = self._of_queries(scores[ranked], outcome[ranked])
                found[:, ranked] = own
        return found[0][:, None], found[1][:, None]

    def _of_queries(self, scores: Singles, relevance: Singles) -> Singles:
        """Gradients and Hessians [2, queries, rows] of rows in the order of their scores."""
        top = min(self.top, scores.shape[1])
        first = relevance[:, :top, None] > relevance[:, None, :]
        paired = relevance[:, :top, None] != relevance[:, None, :]
        apart = scores[:, :top, None] - scores[:, None, :]
        apart = np.where(first, apart, -apart)
        change = np.where(paired, self._change(relevance, top), 0.0)
        spread = (scores[:, 0] != scores[:, -1])[:, None, None]
        change = np.where(spread, change / (np.abs(apart).astype(np.float64) + _APART), change)
        one = np.float32(1.0)
        chance = (one / (np.exp(np.minimum(-apart, _FARTHEST)) + one)).astype(np.float64)
        pull = ((chance - 1.0) * change).astype(np.float32)
        bend = (np.maximum(chance * (1.0 - chance), _LEAST) * change * 2.0).astype(np.float32)
        # To each of the first rows from all others, and to the rows behind them from the first.
        to_first = np.where(first, pull, -pull)
        parts = np.stack([to_first, bend])
        behind = np.stack([-to_first[:, :, top:], bend[:, :, top:]])
        # In single precision, one after the other, as xgboost adds them up.
        found = np.concatenate(
            [np.cumsum(parts, axis=3)[..., -1], np.cumsum(behind, axis=2)[:, :, -1]], axis=2
        )
        later = np.arange(scores.shape[1]) > np.arange(top)[:, None]
        total = -2.0 * np.where(later, pull, 0.0).sum(axis=(1, 2), dtype=np.float64)
        scale = np.where(total > 0, np.log2(1.0 + total) / np.where(total > 0, total, 1.0), 1.0)
        scaled: Singles = found * scale.astype(np.float32)[:, None]
        return scaled

    def _change(self, relevance: Singles, top: int) -> Any:
        """Of the metric where a pair changes places, [queries, top, rows]."""
        return 1.0

    @property
    @override
    def parameters(self) -> dict[str, Any]:
        numbers = {
            "lambdarank_bias_norm": "1",
            "lambdarank_normalization": "1",
            "lambdarank_num_pair_per_sample": str(self.top),
            "lambdarank_pair_method": "topk",
            "lambdarank_score_normalization": "1",
            "lambdarank_unbiased": "0",
            "ndcg_exp_gain": "1",
        }
        return {"lambdarank_param": numbers}


class NdcgRanking(PairwiseRanking):
    """Each pair counts by how much NDCG changes where both change places."""

    name: ClassVar[str] = "rank:ndcg"

    @override
    def _change(self, relevance: Singles, top: int) -> Any:
        gains = np.exp2(relevance.astype(np.float64)) - 1.0
        place = discounts(relevance.shape[1])
        ideal = ideal_gains(relevance, self.top)
        mine, theirs = gains[:, :top, None], gains[:, None, :]
        here, there = place[:top, None], place[None, :]
        change = np.abs((mine * here + theirs * there) - (theirs * here + mine * there))
        inverse = np.where(ideal > 0, 1.0 / np.where(ideal > 0, ideal, 1.0), 0.0)
        return change * inverse[:, None, None]
