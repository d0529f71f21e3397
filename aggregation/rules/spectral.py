"""Rules that look for the direction along which hostile updates stand out: CAF and DnC."""

from __future__ import annotations

import math

import numpy as np

from roundtable.aggregation.conditions import NotFinite, require, require_positive
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.gram import combination, finite_gram
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rules.krum import mean_of_rows
from roundtable.core.errors import AggregationError
from roundtable.core.seeds import numpy_generator


@rule("caf", paper="Allouah et al. 2025, algorithm 1 (covariance-bound agnostic filter)", needs_gram=True)
def caf(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """Weighs updates down in proportion to how far they stand out along the direction of largest variance,
    until n − 2f of the weight is left; returns the weighted mean that had the smallest largest variance.

    Exact eigenvectors, from the Gram matrix; the largest deviation is taken over the updates that still have
    weight. Needs n > 2f.
    """
    rows = matrix.rows
    require("caf", "n > 2f (Allouah et al. 2025)", rows > 2 * f, n=rows, f=f)
    influence, variance = caf_weights(finite_gram(matrix), f)
    return RuleResult(combination(matrix, influence), influence, {"variance": variance})


def caf_weights(products: np.ndarray, f: int) -> tuple[np.ndarray, float]:
    """Shares of the rows in CAF's mean, [n], and the largest variance around it."""
    rows = len(products)
    left = np.ones(rows)
    best, chosen = math.inf, left / rows
    while left.sum() > rows - 2 * f or best == math.inf:
        share = left / left.sum()
        centred = products - np.outer(np.ones(rows), share @ products)
        centred = centred - np.outer(centred @ share, np.ones(rows))
        root = np.sqrt(share)
        values, vectors = np.linalg.eigh(root[:, None] * centred * root[None, :])
        variance = max(float(values[-1]), 0.0)
        if variance < best:
            best, chosen = variance, share
        # ⟨row i − mean, v⟩² for the unit eigenvector v, up to a factor that cancels below.
        deviation = (centred @ (root * vectors[:, -1])) ** 2
        largest = deviation[left > 0].max()
        if not largest > 1e-30 * max(float(np.diagonal(products).max()), 1e-300) ** 2:
            break
        left = left * np.maximum(1 - deviation / largest, 0.0)
        left[deviation >= largest] = 0.0
        if not left.sum() > 0:
            break
    return chosen, best


@rule("dnc", paper="Shejwalkar & Houmansadr 2021, algorithm 2 (divide and conquer)")
def dnc(
    matrix: UpdateMatrix,
    weights: np.ndarray,
    *,
    f: int,
    seed: int,
    iterations: int = 1,
    coordinates: int = 10000,
    filtering: float = 1.0,
) -> RuleResult:
    """In each iteration, on `coordinates` random parameters, leaves out the ⌊filtering · f⌋ updates with the
    largest squared projection on the top right singular vector; the mean of those that were never left out.

    Needs n > 2f, and enough updates for all that is left out.
    """
    rows = matrix.rows
    require("dnc", "n > 2f (Shejwalkar & Houmansadr 2021)", rows > 2 * f, n=rows, f=f)
    require_positive("dnc", "filtering", filtering)
    if iterations < 1 or coordinates < 1:
        raise AggregationError("dnc: iterations and coordinates must be at least 1")
    removed = int(filtering * f)
    require("dnc", "filtering · f < n", removed < rows, n=rows, f=f, filtering=filtering)
    generator = numpy_generator(seed, "dnc")
    size = min(coordinates, matrix.columns)
    samples = [np.sort(generator.choice(matrix.columns, size, replace=False)) for _ in range(iterations)]
    good = np.ones(rows, dtype=bool)
    for sample in _columns(matrix, samples):
        if not np.isfinite(sample).all():
            raise NotFinite
        centred = sample - sample.mean(axis=0)
        values, vectors = np.linalg.eigh(centred @ centred.T)
        scores = values[-1] * vectors[:, -1] ** 2
        good[np.argsort(scores, kind="stable")[rows - removed :]] = False
    if not good.any():
        raise AggregationError(f"dnc left no update after {iterations} iterations: lower them, or filtering")
    return mean_of_rows(matrix, np.flatnonzero(good))


def _columns(matrix: UpdateMatrix, samples: list[np.ndarray]) -> list[np.ndarray]:
    """The columns named by each (sorted) sample, each [n, size] in float64, collected in one pass."""
    gathered = [np.empty((matrix.rows, len(sample))) for sample in samples]
    for start, stop, values in matrix.blocks():
        for sample, target in zip(samples, gathered, strict=True):
            left, right = np.searchsorted(sample, (start, stop))
            if left < right:
                target[:, left:right] = values[:, sample[left:right] - start].double().cpu().numpy()
    return gathered
