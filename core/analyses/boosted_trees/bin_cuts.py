"""Where columns are cut into bins: at values that the study gives, at equal widths, or at quantiles.

Cuts are float32, as xgboost compares them: a row's bin is the number of cuts at or below its value. The last
cut is above every value, so that a split there parts present values from missing ones.

Quantiles come from a sketch: rows are counted in cells between public edges, of equal width at first; the
next edges are the quantiles of what was counted, so that cells grow narrow where rows are. Before anything is
told of the counts, cells are merged until each holds the least count of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from roundtable.core.analyses.exact_sums import Doubles

SKETCH_ROUNDS = 3
_CELLS_EACH = 4
_MOST_CELLS = 1024
TOP = float(np.finfo(np.float32).max)


def cells_for(bins: int) -> int:
    """Cells of a sketch for so many bins."""
    return max(bins, min(_MOST_CELLS, _CELLS_EACH * bins))


def single(values: npt.ArrayLike) -> Doubles:
    """The values rounded to float32, as doubles, ascending and each once."""
    return np.unique(np.asarray(values, dtype=np.float32)).astype(np.float64)


def even_edges(least: float, most: float, cells: int) -> Doubles:
    """Edges [cells + 1] from `least` to just above `most`, padded with the last where float32 has fewer."""
    above = float(np.nextafter(np.float32(most), np.float32(np.inf)))
    return _padded(single(np.linspace(np.float32(least), above, cells + 1)), cells + 1)


def count_cells(values: npt.NDArray[np.float32], edges: Doubles) -> Doubles:
    """Rows in each cell between edges [cells + 1]; missing ones are in none."""
    present = values[~np.isnan(values)].astype(np.float64)
    place = np.clip(np.searchsorted(edges, present, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(place, minlength=len(edges) - 1).astype(np.float64)


def refined(edges: Doubles, counted: Doubles, least: int) -> Doubles:
    """The next edges: quantiles of the counts, which are merged to the least count before."""
    knots, below = _merged(edges, counted, least)
    wanted = np.linspace(0.0, below[-1], len(edges))
    return _padded(single(np.interp(wanted, below, knots)), len(edges))


def quantile_cuts(edges: Doubles, counted: Doubles, least: int, bins: int) -> Doubles:
    """At most `bins` cuts with about equally many rows between them, and no fewer than the least count."""
    knots, below = _merged(edges, counted, least)
    wanted = below[-1] * np.arange(1, bins) / bins
    after = np.clip(np.searchsorted(below, wanted), 1, len(below) - 1)
    nearer = np.where(wanted - below[after - 1] < below[after] - wanted, after - 1, after)
    inner = np.unique(nearer)
    inner = inner[(inner > 0) & (inner < len(knots) - 1)]
    return np.array([*single(knots[inner]), TOP])


def even_cuts(least: float, most: float, bins: int) -> Doubles:
    """`bins` cuts, all but the last at equal distances within the range."""
    return np.array([*single(np.linspace(least, most, bins + 1)[1:-1]), TOP])


def given_cuts(edges: Sequence[float], most: float) -> Doubles:
    """These edges, and one above the range where the last is not."""
    cuts = single(edges)
    return cuts if cuts[-1] > np.float32(most) else np.array([*cuts, TOP])


def bins_of(values: npt.NDArray[np.float32], cuts: Doubles) -> npt.NDArray[np.int64]:
    """The bin of each value; of a missing one the number of cuts. A value that is not below the last cut is
    in the last bin of values."""
    place = np.searchsorted(cuts.astype(np.float32), values, side="right")
    return np.where(np.isnan(values), len(cuts), np.minimum(place, len(cuts) - 1))


def _padded(edges: Doubles, count: int) -> Doubles:
    return np.concatenate([edges, np.full(count - len(edges), edges[-1])])


def _merged(edges: Doubles, counted: Doubles, least: int) -> tuple[Doubles, Doubles]:
    """Edges of which two neighbours hold at least `least` rows, and the rows below each."""
    below = np.concatenate([[0.0], np.cumsum(counted)])
    knots, last = [0], 0.0
    for place in range(1, len(edges)):
        if below[place] - last >= max(least, 1):
            knots.append(place)
            last = below[place]
    # What is left at the top belongs to the last cell that is large enough.
    knots[-1 if len(knots) > 1 else len(knots) :] = [len(edges) - 1]
    return edges[knots], below[knots]
