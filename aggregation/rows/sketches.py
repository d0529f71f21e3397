"""Sketches of rows: a few numbers each, whose angles are about those of the rows.

Each value goes with a random sign into one of a few places (Charikar, Chen, Farach-Colton 2002, section 3,
the count sketch, with one hash), so that inner products are kept in expectation. The cosine of two sketches
is that of their rows give or take about 1/√width. Signs follow from the seed and the place in the row alone,
so that rows of different rounds can be compared.
"""

from __future__ import annotations

import numpy as np

from roundtable.aggregation.rows.column_work import SketchCells
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rows.row_passes import sum_over_cells


def sketches(matrix: UpdateMatrix, seed: int, width: int) -> np.ndarray:
    """[rows, width] in float64: one pass over the data. A row that is not finite spoils its own alone."""
    return sum_over_cells(matrix, SketchCells(seed, width), (matrix.rows, width))
