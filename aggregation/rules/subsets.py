"""Rules that look for the most compact n − f updates: minimum diameter, smallest variance."""

from __future__ import annotations

import itertools
import math

import numpy as np

from roundtable.aggregation.conditions import require
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.gram import finite_gram, squared_distances
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rules.krum import mean_of_rows
from roundtable.core.errors import AggregationError

MAX_SUBSETS = 1 << 20
"""Subsets, or branches of a search for one, that a rule looks at before it gives up."""

_BATCH = 1 << 12


@rule("minimum_diameter_averaging", paper="El Mhamdi et al. 2020, section 3.2", needs_gram=True)
def minimum_diameter_averaging(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The mean of the n − f updates whose largest distance from each other is smallest. Needs n > 2f.

    Exact: the smallest diameter at which f updates can be left out is found by bisection, and whether they
    can is a vertex cover of size f, decided by branching. Raises AggregationError where that takes more than
    about a million branches, which needs f of several dozen and no structure in the distances.
    """
    rows = matrix.rows
    require("minimum_diameter_averaging", "n > 2f (El Mhamdi et al. 2020)", rows > 2 * f, n=rows, f=f)
    distances = squared_distances(finite_gram(matrix))
    steps = np.unique(distances)
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if _can_cover(distances > steps[middle], f):
            high = middle
        else:
            low = middle + 1
    chosen = _first_subset(distances > steps[low], rows - f)
    return mean_of_rows(matrix, chosen, diameter=math.sqrt(distances[np.ix_(chosen, chosen)].max()))


def _first_subset(conflicts: np.ndarray, size: int) -> np.ndarray:
    """The lexicographically first `size` vertices without an edge between them; there is such a set."""
    chosen: list[int] = []
    open_ = np.ones(len(conflicts), dtype=bool)
    for vertex in range(len(conflicts)):
        if not open_[vertex] or len(chosen) == size:
            continue
        rest = open_ & ~conflicts[vertex]
        rest[: vertex + 1] = False
        spare = int(rest.sum()) - (size - len(chosen) - 1)
        if spare >= 0 and _can_cover(conflicts[np.ix_(rest, rest)], spare):
            chosen.append(vertex)
            open_ = rest
    return np.array(chosen)


def _can_cover(conflicts: np.ndarray, budget: int) -> bool:
    """Whether `budget` vertices can touch every edge of the graph: a search that branches on the vertex
    of the highest degree, which is either left out itself or all its neighbours are."""
    pending = [(conflicts, budget)]
    for _ in range(MAX_SUBSETS):
        if not pending:
            return False
        edges, left = pending.pop()
        degrees = edges.sum(axis=1)
        vertex = int(degrees.argmax()) if len(degrees) else 0
        degree = int(degrees[vertex]) if len(degrees) else 0
        if degree == 0:
            return True
        if degree * left < int(degrees.sum()) // 2:
            continue
        others = np.arange(len(edges)) != vertex
        apart = others & ~edges[vertex]
        if degree <= left:
            pending.append((edges[np.ix_(apart, apart)], left - degree))
        pending.append((edges[np.ix_(others, others)], left - 1))
    raise AggregationError(
        "minimum_diameter_averaging would have to try too many subsets; lower f, or use nnm in front of "
        "trimmed_mean"
    )


@rule("smea", paper="Allouah et al. 2023, section 5 (smallest maximum eigenvalue averaging)", needs_gram=True)
def smea(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The mean of the n − f updates whose covariance has the smallest largest eigenvalue. Needs n > 2f.

    Every subset is looked at, with exact eigenvalues; raises AggregationError where there are more than 2^20
    of them (n = 20 allows any f; n = 30 up to f = 6).
    """
    rows = matrix.rows
    require("smea", "n > 2f (Allouah et al. 2023)", rows > 2 * f, n=rows, f=f)
    count = math.comb(rows, f)
    if count > MAX_SUBSETS:
        raise AggregationError(
            f"smea would have to look at {count} subsets for n = {rows}, f = {f}; caf needs no search"
        )
    products = finite_gram(matrix)
    subsets = itertools.combinations(range(rows), rows - f)
    best, chosen = math.inf, np.arange(rows)
    while batch := list(itertools.islice(subsets, _BATCH)):
        indices = np.array(batch)
        values = _largest_eigenvalues(products, indices)
        first = int(np.argmin(values))
        if values[first] < best:
            best, chosen = float(values[first]), indices[first]
    return mean_of_rows(matrix, chosen, variance=best)


def _largest_eigenvalues(products: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """Largest eigenvalue of the covariance of each subset of rows: [batch, k] → [batch]."""
    parts = products[subsets[:, :, None], subsets[:, None, :]]
    parts = parts - parts.mean(axis=1, keepdims=True)
    parts = parts - parts.mean(axis=2, keepdims=True)
    return np.asarray(np.linalg.eigvalsh(parts)[:, -1] / subsets.shape[1])
