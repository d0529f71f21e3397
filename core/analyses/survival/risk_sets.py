"""Sums over risk sets: what Cox's partial likelihood needs of rows on a grid of times, and what follows.

Notation: w a row's weight, x its columns, r = exp(x · slopes). S0 and S1 are the sums of w r and w r x over
those at risk in an interval, D0 and D1 the same over the d people with the event there. With Efron's ties the
l-th of them (l = 0 … d - 1) sees phi = S0 - (l/d) D0 and the mean z = (S1 - (l/d) D1)/phi; with Breslow's l/d
is 0. Its weight is the mean weight of the d (Therneau & Grambsch 2000, sections 3.2, 3.3 and 7.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundtable.core.analyses.exact_sums import Doubles, Shape

Places = npt.NDArray[np.intp]
_LARGEST = float(1 << 33)


@dataclass(frozen=True)
class RiskRows:
    """People: columns [rows, p], the stratum and interval of each, whether it ends in the event, weights.

    `cells` is how many strata and intervals there are.
    """

    columns: Doubles
    stratum: Doubles
    place: Doubles
    died: Doubles
    weights: Doubles
    cells: Shape

    @property
    def flat(self) -> Places:
        """Each row's cell [rows]."""
        found: Places = np.ravel_multi_index(
            (self.stratum.astype(np.int64), self.place.astype(np.int64)), self.cells
        )
        return found


@dataclass(frozen=True)
class RiskSums:
    """By stratum and interval [strata, intervals, 1 + p]: sums of w r and w r x over those who leave there
    (`leaving`), and over those of them with the event (`dying`)."""

    leaving: Doubles
    dying: Doubles


@dataclass(frozen=True)
class RiskCurves:
    """What the risk sets add to the log-likelihood, its gradient [p] and the outer part of its information
    [p, p]; by interval the cumulated hazard and the part of it that one with the event there does not have
    (`tied`) [strata, intervals], and for residuals [strata, intervals, p]: the mean of z, and hazard and
    tied part weighted with z."""

    likelihood: float
    gradient: Doubles
    outer: Doubles
    hazard: Doubles
    tied: Doubles
    middle: Doubles
    drift: Doubles
    tied_drift: Doubles


def risks(rows: RiskRows, slopes: Doubles) -> Doubles:
    """w r of each row; infinite where it is beyond double precision."""
    with np.errstate(over="ignore"):
        found: Doubles = rows.weights * np.exp(rows.columns @ slopes)
    return found


def by_cell(values: Doubles, cell: Places, cells: Shape) -> Doubles:
    """Sums of rows' values [rows, m] by cell, [strata, intervals, m]."""
    size = int(np.prod(cells))
    summed = [np.bincount(cell, column, size).astype(np.float64) for column in values.T]
    return np.stack(summed, axis=-1).reshape(*cells, len(summed))


def risk_sums(rows: RiskRows, slopes: Doubles) -> RiskSums | None:
    """The sums of these rows; None where they are beyond the range of sums that travel."""
    risk = risks(rows, slopes)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = risk[:, None] * np.column_stack([np.ones(len(risk)), rows.columns])
    if not np.abs(terms).sum() < _LARGEST:
        return None
    died = rows.died > 0
    return RiskSums(by_cell(terms, rows.flat, rows.cells), by_cell(terms[died], rows.flat[died], rows.cells))


def of_events(rows: RiskRows, slopes: Doubles) -> dict[str, Doubles]:
    """Of those with the event: the sums of w x · slopes and of w x, and of w by cell (`fallen`)."""
    weights = (rows.weights * rows.died)[:, None]
    died, fallen = rows.columns * weights, by_cell(weights, rows.flat, rows.cells)[..., 0]
    return {"likelihood": np.array([(died @ slopes).sum()]), "gradient": died.sum(axis=0), "fallen": fallen}


def risk_curves(sums: RiskSums, events: Doubles, fallen: Doubles, efron: bool) -> RiskCurves | None:
    """What follows from the sums over all rows; `events` counts, `fallen` adds up the weights of those with
    the event, [strata, intervals]. None where a risk set is empty as far as the sums tell."""
    at_risk = np.cumsum(sums.leaving[:, ::-1], axis=1)[:, ::-1]
    width = sums.leaving.shape[-1] - 1
    cells, likelihood = events.shape, 0.0
    gradient, outer = np.zeros(width), np.zeros((width, width))
    step, tied = np.zeros(cells), np.zeros(cells)
    middle, drift, tied_drift = (np.zeros((*cells, width)) for _ in range(3))
    each = fallen / np.maximum(events, 1.0)
    for number in range(int(events.max(initial=0.0)) if efron else 1):
        there = events > number
        count = events[there]
        share = number / count if efron else np.zeros(len(count))
        weight = each[there] * (1.0 if efron else count)
        seen = at_risk[there] - share[:, None] * sums.dying[there]
        phi = seen[:, 0]
        if not (phi > 0).all():
            return None
        mean = seen[:, 1:] / phi[:, None]
        likelihood -= float((weight * np.log(phi)).sum())
        gradient -= weight @ mean
        outer += (mean * weight[:, None]).T @ mean
        pace = weight / phi
        step[there] += pace
        tied[there] += share * pace
        middle[there] += mean / (count[:, None] if efron else 1.0)
        drift[there] += pace[:, None] * mean
        tied_drift[there] += (share * pace)[:, None] * mean
    return RiskCurves(
        likelihood,
        gradient,
        outer,
        np.cumsum(step, axis=1),
        tied,
        middle,
        np.cumsum(drift, axis=1),
        tied_drift,
    )


def second_moments(rows: RiskRows, slopes: Doubles, hazard: Doubles, tied: Doubles) -> Doubles:
    """The part of the information that is a sum over rows, [p, p]: no second moment by time leaves."""
    exposed = hazard.ravel()[rows.flat] - rows.died * tied.ravel()[rows.flat]
    weighted = rows.columns * (risks(rows, slopes) * exposed)[:, None]
    found: Doubles = weighted.T @ rows.columns
    return found


def influences(
    rows: RiskRows,
    slopes: Doubles,
    hazard: Doubles,
    tied: Doubles,
    middle: Doubles,
    drift: Doubles,
    tied_drift: Doubles,
) -> Doubles:
    """The derivative of the likelihood's gradient by each row's weight, times the weight, [rows, p]: the
    infinitesimal jackknife, also of tied times."""
    cell, died = rows.flat, rows.died[:, None]
    width = rows.columns.shape[1]
    exposed = hazard.ravel()[cell] - rows.died * tied.ravel()[cell]
    drawn = drift.reshape(-1, width)[cell] - died * tied_drift.reshape(-1, width)[cell]
    own = died * (rows.columns - middle.reshape(-1, width)[cell])
    pulled = risks(rows, slopes)[:, None] * (rows.columns * exposed[:, None] - drawn)
    found: Doubles = rows.weights[:, None] * own - pulled
    return found
