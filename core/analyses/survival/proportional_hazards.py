"""Grambsch and Therneau's test of proportional hazards, on Schoenfeld's residuals.

With u = the sum over those with the event of (g(t) - mean g) (x - mean of x over its risk set), V the
covariance of the estimates and D events, a column's chi-square is D (V u)^2 / (V sum (g - mean g)^2), and
that of all columns D u' V u / sum (g - mean g)^2 (Grambsch & Therneau 1994, with lifelines' signs and ties).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roundtable.core.analyses.estimates import inverted
from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.moments import or_none
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.analyses.survival.risk_sets import RiskRows

TIME_FUNCTIONS = ("identity", "log", "km")


def time_functions(public: Arrays) -> Doubles:
    """g of each interval, less its mean over the events, [functions, strata, intervals]: time, its logarithm,
    and one minus Kaplan and Meier's curve of all strata together."""
    ends, events, leavers = public["ends"], public["events"], public["leavers"]
    times, place = np.unique(ends, return_inverse=True)
    died, gone = (np.bincount(place.ravel(), each.ravel(), len(times)) for each in (events, leavers))
    at_risk = np.cumsum(gone[::-1])[::-1]
    survival = np.cumprod(1 - died / np.maximum(at_risk, 1))
    known = np.where(ends > 0, ends, 1.0)
    found = np.stack([ends, np.log(known), 1 - survival[place.reshape(ends.shape)]])
    means = (found * events).sum(axis=(1, 2)) / events.sum()
    return np.asarray(found - means[:, None, None], np.float64)


def departures(rows: RiskRows, public: Arrays) -> Doubles:
    """A silo's part of u for each function of time, [functions, p]."""
    width = rows.columns.shape[1]
    left = (rows.columns - public["middle"].reshape(-1, width)[rows.flat]) * rows.died[:, None]
    weights = time_functions(public).reshape(len(TIME_FUNCTIONS), -1)[:, rows.flat]
    return np.asarray(weights @ left, np.float64)


def schoenfeld_test(terms: list[str], public: Arrays) -> dict[str, Any]:
    """By function of time: chi-square and p of each column, and of all together (`global`)."""
    inverse, events = inverted(public["hessian"]), public["events"]
    found: dict[str, Any] = {"terms": terms}
    for name, g, u in zip(TIME_FUNCTIONS, time_functions(public), public["departures"], strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = events.sum() / (g**2 * events).sum()
            each = (inverse @ u) ** 2 / np.diag(inverse) * scale
            together = float(u @ inverse @ u * scale)
        found[name] = {
            "chi2": [or_none(value) for value in each],
            "p": [or_none(value) for value in stats.chi2.sf(each, 1)],
            "global_chi2": or_none(together),
            "global_p": or_none(float(stats.chi2.sf(together, len(terms)))),
        }
    return found


def departures_note(terms: list[str], found: dict[str, Any]) -> str:
    """One line about the test."""
    chances = zip(terms, found["km"]["p"], strict=True)
    told = ", ".join(f"{term} {'none' if p is None else format(p, '.3g')}" for term, p in chances)
    return f"proportional hazards against 1 - S(t), p: {told}"
