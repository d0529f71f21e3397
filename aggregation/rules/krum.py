"""Krum and what is built on it: rules that keep the updates with the closest neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.conditions import require
from roundtable.aggregation.influence import kept_around_median
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.gram import combination, finite_gram, squared_distances, without_rounding
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rules.coordinate import mean_nearest_to_median
from roundtable.core.errors import AggregationError


def krum_scores(distances: np.ndarray, neighbours: int) -> np.ndarray:
    """Sum of the squared distances of each row to its `neighbours` nearest others, [n], from [n, n]."""
    others = np.sort(distances + np.diag(np.full(len(distances), -1.0)), axis=1)[:, 1:]
    return without_rounding(others[:, :neighbours].sum(axis=1))


def mean_of_rows(matrix: UpdateMatrix, chosen: np.ndarray, **details: object) -> RuleResult:
    """The plain mean of the rows named by `chosen`."""
    influence = np.zeros(matrix.rows)
    influence[chosen] = 1 / len(chosen)
    return RuleResult(combination(matrix, influence), influence, details)


@rule("krum", paper="Blanchard et al. 2017, section 4", needs_gram=True)
def krum(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The one update with the smallest sum of squared distances to its n − f − 2 nearest others.

    Needs n > 2f + 2. Among equal scores the first row wins.
    """
    require("krum", "n > 2f + 2 (Blanchard et al. 2017)", matrix.rows > 2 * f + 2, n=matrix.rows, f=f)
    scores = krum_scores(squared_distances(finite_gram(matrix)), matrix.rows - f - 2)
    return mean_of_rows(matrix, np.array([np.argmin(scores)]), scores=scores)


@rule("multi_krum", paper="Blanchard et al. 2017, section 5", needs_gram=True)
def multi_krum(matrix: UpdateMatrix, weights: np.ndarray, *, f: int, m: int | None = None) -> RuleResult:
    """The mean of the m updates with the best Krum scores; m is n − f unless given. Needs n > 2f + 2.

    The paper leaves m free between 1 (Krum) and n.
    """
    rows = matrix.rows
    require("multi_krum", "n > 2f + 2 (Blanchard et al. 2017)", rows > 2 * f + 2, n=rows, f=f)
    m = rows - f if m is None else m
    if not 1 <= m <= rows:
        raise AggregationError(f"multi_krum: m must be from 1 to n = {rows}, not {m}")
    scores = krum_scores(squared_distances(finite_gram(matrix)), rows - f - 2)
    return mean_of_rows(matrix, np.argsort(scores, kind="stable")[:m], scores=scores)


def _kept_by_bulyan(
    values: torch.Tensor, parameters: Mapping[str, Any], details: Mapping[str, Any]
) -> torch.Tensor:
    chosen = torch.from_numpy(np.flatnonzero(details["selected"])).to(values.device)
    kept = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    kept[chosen] = kept_around_median(values[chosen], len(chosen) - 2 * parameters["f"])
    return kept


@rule("bulyan", paper="El Mhamdi et al. 2018, section 4", needs_gram=True, kept=_kept_by_bulyan)
def bulyan(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """Krum chooses θ = n − 2f updates one after another, then each coordinate is the mean of its
    β = θ − 2f values nearest to the median. Needs n ≥ 4f + 3."""
    rows = matrix.rows
    require("bulyan", "n ≥ 4f + 3 (El Mhamdi et al. 2018)", rows >= 4 * f + 3, n=rows, f=f)
    chosen = bulyan_selection(squared_distances(finite_gram(matrix)), f)
    vector = mean_nearest_to_median(matrix.select(chosen), len(chosen) - 2 * f)
    return RuleResult(vector, details={"selected": np.isin(np.arange(rows), chosen)})


def bulyan_selection(distances: np.ndarray, f: int) -> list[int]:
    """The θ = n − 2f rows that Krum picks in turn, each out of those left; of equal ones the first.

    When few are left, two rows that are each other's nearest have the same score.
    """
    left = list(range(len(distances)))
    chosen: list[int] = []
    for _ in range(len(distances) - 2 * f):
        scores = krum_scores(distances[np.ix_(left, left)], max(len(left) - f - 2, 1))
        chosen.append(left.pop(int(np.argmin(scores))))
    return sorted(chosen)
