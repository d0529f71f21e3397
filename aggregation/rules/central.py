"""Rules that walk towards a centre: the geometric median, centred clipping."""

from __future__ import annotations

import math

import numpy as np
import torch

from roundtable.aggregation.conditions import require_positive
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.gram import (
    combination,
    combine,
    finite_gram,
    finite_norms,
    gram_around,
    inner_products,
    medoid,
    squared_distances,
)
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.core.errors import AggregationError, ConfigError

_CANCELLED = 2.0**-20
"""Squared distances below this share of the norms have lost 20 of 52 bits in the Gram matrix."""


@rule("geometric_median", paper="Pillutla et al. 2022, algorithm 2 (RFA); Weiszfeld 1937", needs_gram=True)
def geometric_median(
    matrix: UpdateMatrix,
    weights: np.ndarray,
    *,
    smoothing: float = 1e-6,
    tolerance: float = 1e-9,
    max_iterations: int = 1000,
    start: str = "mean",
) -> RuleResult:
    """The point with the smallest sum of distances to the updates, by the smoothed Weiszfeld iteration.

    Distances below `smoothing` count as that long. Ends when a step is shorter than `tolerance` times the
    median distance, or after `max_iterations`. With start = "mean" a median that coincides with an update is
    found exactly; "zeros" begins at the origin, as a fixed number of iterations in secure aggregation would.
    Sound while fewer than half of the updates are byzantine.
    """
    require_positive("geometric_median", "smoothing", smoothing)
    if start not in ("mean", "zeros"):
        raise ConfigError(f'geometric_median: start must be "mean" or "zeros", not {start!r}')
    if max_iterations < 1 or tolerance < 0:
        raise AggregationError("geometric_median needs max_iterations ≥ 1 and a tolerance of at least 0")
    products = finite_gram(matrix)
    centre, centred = _centred(matrix, products)
    lengths = np.sqrt(np.diagonal(products)) if start == "zeros" else None
    share, steps = weiszfeld(centred, centre, smoothing, tolerance, max_iterations, lengths)
    return RuleResult(combination(matrix, share), share, {"iterations": steps})


def _centred(matrix: UpdateMatrix, products: np.ndarray) -> tuple[int, np.ndarray]:
    """The row c with the smallest sum of distances, and ⟨row i − c, row j − c⟩ to its last digits."""
    squared = squared_distances(products)
    centre = medoid(squared)
    near = squared[centre] < _CANCELLED * (np.diagonal(products) + products[centre, centre])
    near[centre] = False
    if near.any():
        centred = gram_around(matrix, centre)
        # Among rows that were told apart by their differences another one may be the middle.
        return medoid(squared_distances(centred)), centred
    across = products - products[centre]
    return centre, np.asarray(across - across[:, [centre]])


def weiszfeld(
    centred: np.ndarray,
    centre: int,
    smoothing: float,
    tolerance: float,
    max_iterations: int,
    lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Shares of the rows in the geometric median, [n], and the number of iterations.

    A point is known by its shares a, and its distances by `centred`, the products of rows around one of them.
    `centre` is the row with the smallest sum of distances: that one is honest company, so a hostile row of
    any norm costs no precision. `lengths` are the rows' distances to where it begins; None for their mean.
    """
    squared = squared_distances(centred)
    share = np.full(len(centred), 1 / len(centred))
    if lengths is None and _is_median(squared, centre):
        return np.eye(len(centred))[centre], 0
    lengths = _to_point(centred, share) if lengths is None else lengths
    for step in range(1, max_iterations + 1):
        pull = 1 / np.maximum(lengths, smoothing)
        change = pull / pull.sum() - share
        share = share + change
        lengths = _to_point(centred, share)
        moved = math.sqrt(max(change @ centred @ change, 0.0))
        if step > 1 and moved <= tolerance * float(np.median(lengths)):
            return share, step
    return share, max_iterations


def _to_point(centred: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Distance of each row to Σ_i share[i] · row i, [n]; shares add up to 1."""
    along = centred @ share
    return np.asarray(np.sqrt(np.maximum(np.diagonal(centred) - 2 * along + share @ along, 0.0)))


def _is_median(squared: np.ndarray, index: int) -> bool:
    """Whether a row is the geometric median: the unit vectors from it to the others add up to no more than
    the number of rows that coincide with it. Only the row with the smallest sum of distances can be."""
    away = squared[index] > 0
    lengths = np.sqrt(squared[index][away])
    inner = (lengths[:, None] ** 2 + lengths[None, :] ** 2 - squared[np.ix_(away, away)]) / 2
    pull = (inner / np.outer(lengths, lengths)).sum()
    return bool(math.sqrt(max(pull, 0.0)) <= len(squared) - away.sum())


@rule("centred_clipping", paper="Karimireddy et al. 2021, algorithm 2")
def centred_clipping(
    matrix: UpdateMatrix,
    weights: np.ndarray,
    *,
    tau: float,
    iterations: int = 1,
    previous: torch.Tensor | None = None,
) -> RuleResult:
    """v ← v + mean of (row i − v) · min(1, τ / ‖row i − v‖), `iterations` times, from the aggregate of the
    previous round, or from zero in the first."""
    require_positive("centred_clipping", "tau", tau)
    if iterations < 1:
        raise AggregationError(f"centred_clipping: iterations must be at least 1, not {iterations}")
    rows = matrix.rows
    centre = _products_with_centre(matrix, previous, only_centre=iterations == 1)
    # The last row is the centre of the previous round.
    share = np.eye(rows + 1)[rows]
    for _ in range(iterations):
        along = centre @ share
        squared = np.diagonal(centre)[:rows] - 2 * along[:rows] + share @ along
        lengths = np.sqrt(np.maximum(squared, 0.0))
        pull = np.divide(tau, lengths, out=np.ones(rows), where=lengths > tau) / rows
        share = share * (1 - pull.sum())
        share[:rows] += pull
    vector = combine(matrix, share[:rows])
    if previous is not None:
        vector.add_(previous.to(vector), alpha=float(share[rows]))
    return RuleResult(vector, share[:rows], {"carried_over": float(share[rows])})


def _products_with_centre(
    matrix: UpdateMatrix, previous: torch.Tensor | None, only_centre: bool
) -> np.ndarray:
    """Gram matrix of the rows and, last, the centre, [n + 1, n + 1]. The first step looks at distances from
    the centre alone: with `only_centre`, products of two different rows are left at zero, unmeasured."""
    extended = np.zeros((matrix.rows + 1, matrix.rows + 1))
    extended[:-1, :-1] = np.diag(finite_norms(matrix) ** 2) if only_centre else finite_gram(matrix)
    if previous is not None:
        across, own = inner_products(matrix, previous)
        extended[-1, :-1] = extended[:-1, -1] = across
        extended[-1, -1] = own
    return extended
