"""Inner products of updates, in float64: all that a distance-based rule has to know.

A rule that looks at norms, distances, angles or principal directions of n updates is a function of their
n × n Gram matrix, and its answer is a linear combination of the updates. So two passes over the data are
enough however many iterations the rule makes, and they work out of core.

Float64 is not a luxury: updates of one round share a large common part, and in float32 the distances of
near-equal updates drown in cancellation (Krum then picks the wrong one). Centring on a row first would let
a single hostile row of large norm destroy the precision of all others.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

import numpy as np
import torch

from roundtable.aggregation.conditions import NotFinite
from roundtable.aggregation.rows.column_work import (
    AlongCells,
    ApartCells,
    AroundCells,
    Combination,
    GramCells,
    NormCells,
)
from roundtable.aggregation.rows.file_matrix import FileRows, SelectedFiles
from roundtable.aggregation.rows.matrix import MixedRows, SelectedRows, UpdateMatrix
from roundtable.aggregation.rows.row_passes import ColumnPass, sum_over_cells
from roundtable.core.errors import AggregationError

_grams: MutableMapping[UpdateMatrix, np.ndarray] = weakref.WeakKeyDictionary()
_norms: MutableMapping[UpdateMatrix, np.ndarray] = weakref.WeakKeyDictionary()


def gram(matrix: UpdateMatrix) -> np.ndarray:
    """⟨row i, row j⟩ for all pairs, [n, n] in float64: one pass over the data, remembered for this matrix.

    A row that is not finite spoils only its own line and column.
    """
    if isinstance(matrix, SelectedRows) and matrix.in_order:
        return np.asarray(gram(matrix.base)[np.ix_(matrix.indices, matrix.indices)])
    if isinstance(matrix, MixedRows):
        mixed = matrix.mixing @ gram(matrix.base) @ matrix.mixing.T
        return np.asarray((mixed + mixed.T) / 2)
    if matrix not in _grams:
        _grams[matrix] = sum_over_cells(matrix, GramCells(), (matrix.rows, matrix.rows))
    return _grams[matrix]


def finite_gram(matrix: UpdateMatrix) -> np.ndarray:
    """`gram`, for a rule: raises AggregationError where an update is not finite."""
    products = gram(matrix)
    if not np.isfinite(np.diagonal(products)).all():
        raise NotFinite
    return products


def finite_norms(matrix: UpdateMatrix) -> np.ndarray:
    """‖row i‖, [n], for a rule: raises AggregationError where an update is not finite."""
    norms = np.sqrt(squared_norms(matrix))
    if not np.isfinite(norms).all():
        raise NotFinite
    return np.asarray(norms)


def squared_norms(matrix: UpdateMatrix) -> np.ndarray:
    """‖row i‖², [n] in float64: from the Gram matrix where it is known, else by one pass, remembered."""
    if isinstance(matrix, SelectedRows) and matrix.in_order:
        return squared_norms(matrix.base)[list(matrix.indices)]
    if isinstance(matrix, MixedRows):
        return _mixed_norms(matrix)
    if matrix in _grams:
        return np.diagonal(_grams[matrix]).copy()
    if matrix not in _norms:
        _norms[matrix] = sum_over_cells(matrix, NormCells(), (matrix.rows,))
    return _norms[matrix]


def squared_distances(products: np.ndarray) -> np.ndarray:
    """‖row i − row j‖² from the Gram matrix, [n, n]; never negative, zero on the diagonal."""
    norms = np.diagonal(products)
    distances = np.maximum(norms[:, None] + norms[None, :] - 2 * products, 0.0)
    np.fill_diagonal(distances, 0.0)
    return np.asarray(distances)


def distances_from(matrix: UpdateMatrix, pivot: int) -> np.ndarray:
    """‖row i − row p‖², [n], for a rule: one pass over the data, however many rows there are.

    Raises AggregationError where an update is not finite.
    """
    if isinstance(matrix, MixedRows):
        return np.asarray(squared_distances(finite_gram(matrix))[pivot])
    distances = sum_over_cells(matrix, ApartCells(pivot), (matrix.rows,))
    if not np.isfinite(distances).all():
        raise NotFinite
    return distances


def without_rounding(values: np.ndarray) -> np.ndarray:
    """Distances or scores to be ranked, cut to 40 bits each: what is equal but for rounding becomes a tie,
    and a stable sort then decides it by row, not by noise."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(mantissa * 2.0**40), exponent - 40))


def gram_around(matrix: UpdateMatrix, centre: int) -> np.ndarray:
    """⟨row i − row c, row j − row c⟩, [n, n] in float64, of the differences themselves: one more pass.

    The Gram matrix loses the digits of rows that are close together and far from the origin. The row c must
    be an honest one: its own rounding is in all differences.
    """
    if isinstance(matrix, SelectedRows) and matrix.in_order:
        chosen = list(matrix.indices)
        return np.asarray(gram_around(matrix.base, chosen[centre])[np.ix_(chosen, chosen)])
    if isinstance(matrix, MixedRows):
        # Rows of the mixing add up alike, so that their differences do not see where the base is centred.
        apart = matrix.mixing - matrix.mixing[centre]
        if np.abs(apart.sum(axis=1)).max() > 1e-12:
            around = gram(matrix.base)
        else:
            around = gram_around(matrix.base, medoid(squared_distances(gram(matrix.base))))
        mixed = apart @ around @ apart.T
        return np.asarray((mixed + mixed.T) / 2)
    return sum_over_cells(matrix, AroundCells(centre), (matrix.rows, matrix.rows))


def medoid(squared: np.ndarray) -> int:
    """The row with the smallest sum of distances to the others, from their squares [n, n]."""
    return int(np.argmin(np.sqrt(squared).sum(axis=1)))


def inner_products(matrix: UpdateMatrix, vector: torch.Tensor) -> tuple[np.ndarray, float]:
    """⟨row i, vector⟩ for all rows, [n], and ‖vector‖², in float64: one pass over the data."""
    if isinstance(matrix, MixedRows):
        across, own = inner_products(matrix.base, vector)
        return np.asarray(matrix.mixing @ across), own
    if vector.shape != (matrix.columns,):
        raise AggregationError(
            f"a vector of {vector.numel()} values cannot be compared with updates of {matrix.columns}"
        )
    sums = sum_over_cells(matrix, AlongCells(vector), (matrix.rows + 1,))
    return sums[:-1], float(sums[-1])


def combine(matrix: UpdateMatrix, factors: np.ndarray) -> torch.Tensor:
    """Σ_i factors[i] · row i, [d] in the dtype of the matrix; rows with factor 0 are not looked at."""
    return combination(matrix, factors).whole()


def combination(matrix: UpdateMatrix, factors: np.ndarray) -> ColumnPass:
    """The pass that gives `combine`'s vector."""
    if isinstance(matrix, MixedRows):
        return combination(matrix.base, factors @ matrix.mixing)
    if isinstance(matrix, SelectedRows) and matrix.in_order:
        spread = np.zeros(matrix.base.rows)
        spread[list(matrix.indices)] = factors
        return combination(matrix.base, spread)
    used = np.flatnonzero(factors)
    size = matrix.rows * matrix.columns
    matrix = matrix.files if isinstance(matrix, SelectedFiles) else matrix
    if isinstance(matrix, FileRows) and len(used) < matrix.rows:
        matrix, factors = matrix.subset(used.tolist()), factors[used]
    return ColumnPass(matrix, Combination(np.asarray(factors)), size)


def _mixed_norms(matrix: MixedRows) -> np.ndarray:
    mixing = matrix.mixing
    if mixing.shape[0] == mixing.shape[1] and np.array_equal(mixing, np.diag(np.diagonal(mixing))):
        return np.asarray(np.diagonal(mixing) ** 2 * squared_norms(matrix.base))
    return np.diagonal(gram(matrix)).copy()
