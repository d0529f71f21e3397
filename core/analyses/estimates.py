"""Linear algebra of fits: systems solved with a check of their pivots, and estimates with their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.scipy_parts import linalg, stats

LEAST_PIVOT = 1e-10
"""Of the correlations: below, a column is a sum of others as far as the sums tell."""
HEADER = ("term", "coefficient", "error", "95 % from", "to", "p")


def coefficients(
    terms: list[str], estimates: Doubles, errors: Doubles, freedom: float | None
) -> dict[str, Any]:
    """Estimates with errors, 95 % intervals and p values; normal where `freedom` is None, else Student's."""
    law = stats.norm if freedom is None else stats.t(freedom)
    reach = float(law.ppf(0.975)) * errors
    with np.errstate(divide="ignore", invalid="ignore"):
        p = 2 * law.sf(np.abs(estimates / errors))
    return {
        "terms": terms,
        "coefficients": estimates.tolist(),
        "errors": errors.tolist(),
        "p": np.asarray(p).tolist(),
        "intervals": np.column_stack([estimates - reach, estimates + reach]).tolist(),
    }


def coefficient_rows(values: Mapping[str, Any]) -> list[list[Any]]:
    """The rows of a table under `HEADER`."""
    columns = (values[key] for key in ("terms", "coefficients", "errors", "intervals", "p"))
    return [[term, b, error, *interval, p] for term, b, error, interval, p in zip(*columns, strict=True)]


def solve(matrix: Doubles, right: Doubles) -> tuple[Doubles | None, int]:
    """x of matrix · x = right for a positive definite matrix, scaled to a unit diagonal; or None and the
    place of the pivot that is none."""
    scale = np.sqrt(np.maximum(np.diag(matrix), 0.0))
    if not (scale > 0).all():
        return None, int(np.flatnonzero(~(scale > 0))[0])
    scaled = matrix / np.outer(scale, scale)
    lower = np.zeros_like(scaled)
    for place in range(len(scaled)):
        pivot = scaled[place, place] - lower[place, :place] @ lower[place, :place]
        if not pivot > LEAST_PIVOT:
            return None, place
        lower[place, place] = np.sqrt(pivot)
        rest = scaled[place + 1 :, place] - lower[place + 1 :, :place] @ lower[place, :place]
        lower[place + 1 :, place] = rest / lower[place, place]
    solved: Doubles = linalg.cho_solve((lower, True), right / scale) / scale
    return solved, -1


def inverted(matrix: Doubles) -> Doubles:
    """The inverse of a positive definite matrix, scaled to a unit diagonal before."""
    scale = np.sqrt(np.diag(matrix))
    factor = linalg.cho_factor(matrix / np.outer(scale, scale), lower=True)
    inverse: Doubles = linalg.cho_solve(factor, np.eye(len(matrix))) / np.outer(scale, scale)
    return inverse
