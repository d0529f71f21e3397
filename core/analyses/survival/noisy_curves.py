"""Kaplan-Meier curves and the log-rank test under noise, from counts of who leaves in each interval.

A person leaves once, with the event or without, in one interval of the public grid: so a row changes all
counts of a question by 1 together. Who is at risk is the sum of those who leave later: numbers at risk that
were released themselves would change by a row in all intervals before its time.

Errors are Greenwood's, and that of the noise by the delta method: the derivatives of what is told by each
count, times the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.noisy.noisy_quantiles import rising
from roundtable.core.analyses.noisy.noisy_question import (
    Q95,
    NoisyQuestion,
    SumBlock,
    as_places,
    counted,
)
from roundtable.core.analyses.question import Answer, by_group
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.analyses.survival.survival_curves import KaplanMeier
from roundtable.core.analyses.survival.time_grid import TimeGrid
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_FEWEST = 4.0
"""Standard deviations of its noise that the number at risk has to reach where a curve goes on."""
_DROWNED = "beside the noise nobody is at risk: a higher epsilon, more rows or wider intervals would help"


class NoisyKaplanMeier(NoisyQuestion):
    """The share of people without the event, by time, for each group; of several groups the log-rank test."""

    ask: ClassVar[str] = "survival"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        title: str,
        time: str,
        event: str,
        every: float,
        by: str | None,
        until: float | None,
    ) -> None:
        super().__init__(columns, title)
        self._exact = KaplanMeier(columns, 1, title, time, event, every, by, until)
        self._grid = TimeGrid(self, time, event, every)
        self.until = until

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return self._exact.names

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self._exact.told

    @property
    @override
    def blocks(self) -> Mapping[str, SumBlock]:
        return {"leavers": SumBlock((len(self._exact.labels), 2, self._grid.intervals), 1.0)}

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        """[groups, (without the event, with it), intervals]."""
        groups, width = len(self._exact.labels), self._grid.intervals
        span = self.number(self._exact.time)
        place = self._grid.place(np.clip(table.column(self._exact.time), span.least, span.most))
        cell = place + width * table.column(self._exact.event)
        group = by_group(table, self._exact.by, groups)
        found = as_places(cell, group, (groups, 2 * width))
        return {"leavers": found.reshape(groups, 2, width)}

    @override
    def answer(self, public: Arrays) -> Answer:
        labels, leavers = self._exact.labels, public["leavers"]
        noise = self.spread("leavers", self.silos(public))
        width = self._grid.every
        curves = {
            label: noisy_curve(own, noise, width, self.until)
            for label, own in zip(labels, leavers, strict=True)
        }
        told = {label: curve for label, curve in curves.items() if curve is not None}
        if not told:
            return Answer(self.title, self.ask, why=_DROWNED)
        header = [self._exact.by or "group", "rows", "events", "median", "95 % from", "to"]
        if self.until is not None:
            header += [f"mean until {self.until:g}", "error"]
        rows: list[list[Any]] = []
        for label, own in zip(labels, leavers, strict=True):
            curve = told.get(label)
            line = [label, counted(float(own.sum())), counted(float(own[1].sum()))]
            line += [None] * 3 if curve is None else [curve["median"], *curve["median_interval"]]
            if self.until is not None:
                known = {} if curve is None else curve["restricted"]
                line += [known.get("mean"), known.get("error")]
            rows.append(line)
        spread = noise * math.sqrt(2 * self._grid.intervals)
        notes = [f"rows are within ± {Q95 * spread:.4g} in 95 of 100 surveys; intervals count the noise in"]
        notes += [f"{label}: beside the noise nobody is at risk" for label in labels if label not in told]
        last = min(curve["times"][-1] for curve in told.values())
        if last < self._grid.intervals * width:
            notes.append(f"curves end at {last:g} or later: then the noise hides who is at risk")
        values: dict[str, Any] = {"curves": told}
        if len(labels) > 1:
            values["log_rank"] = test = noisy_log_rank(leavers, noise)
            if test["chi2"] is None:
                notes.append("no log-rank test: beside the noise the groups are not at risk together")
            else:
                notes.append(
                    f"log-rank chi-square {test['chi2']:.6g}, {test['df']} degrees of freedom, p "
                    f"{test['p']:.4g}, with the noise counted in"
                )
        return Answer(self.title, self.ask, header, rows, values, notes=notes)


def at_risk_of(leavers: Doubles) -> Doubles:
    """[..., intervals] at risk when each interval begins, of leavers [..., 2, intervals]."""
    found: Doubles = leavers.sum(axis=-2)[..., ::-1].cumsum(axis=-1)[..., ::-1]
    return found


def known_until(risk: Doubles, noise: float) -> int:
    """How many intervals, from the first on, have a number at risk that stands out of its noise."""
    intervals = risk.shape[-1]
    spread = noise * np.sqrt(2.0 * np.arange(intervals, 0, -1))
    hidden = np.flatnonzero((risk < _FEWEST * spread).reshape(-1, intervals).any(axis=0))
    return int(hidden[0]) if hidden.size else intervals


def noisy_curve(leavers: Doubles, noise: float, every: float, until: float | None) -> dict[str, Any] | None:
    """The curve of one group's leavers [2, intervals] with noise of this standard deviation on each count;
    None where it does not begin."""
    intervals = leavers.shape[1]
    risk, died = at_risk_of(leavers), leavers[1]
    used = known_until(risk, noise)
    # Noise that leaves no survivors of an interval says no more than that few are left.
    ended = np.flatnonzero(died[:used] >= risk[:used])
    used = int(ended[0]) if ended.size else used
    if not used:
        return None
    n, d = risk[:used], died[:used]
    logs = np.cumsum(np.log1p(-d / n))
    greenwood = np.maximum(np.cumsum(d / (n * (n - d))), 0.0)
    slopes = _slopes(n, d, intervals)
    error = np.sqrt(greenwood + noise**2 * (slopes**2).sum(axis=(1, 2)))
    # The curve that does not rise and is nearest to what was found.
    survival = np.exp(-np.maximum(rising(-logs), 0.0))
    lower, upper = (np.minimum(np.exp(logs + side * Q95 * error), 1.0) for side in (-1, 1))
    times = every * np.arange(1, used + 1)
    curve = {
        "times": times.tolist(),
        "at_risk": n.tolist(),
        "events": d.tolist(),
        "survival": survival.tolist(),
        "lower": np.minimum(lower, survival).tolist(),
        "upper": np.maximum(upper, survival).tolist(),
        "median": _first(times, survival <= 0.5),
        "median_interval": [_first(times, lower <= 0.5), _first(times, upper <= 0.5)],
    }
    if until is not None:
        curve["restricted"] = _restricted(np.exp(logs), slopes, n, d, noise, every, until)
    return curve


def _first(times: npt.NDArray[np.floating[Any]], where: Any) -> float | None:
    found = np.flatnonzero(where)
    return float(times[found[0]]) if found.size else None


def _slopes(n: Doubles, d: Doubles, intervals: int) -> Doubles:
    """Derivatives of log S at the end of each used interval by each count [used, 2, intervals].

    log S = Σ log (n_k − d_k) − log n_k over k up to it. One more who leaves in interval j is at risk in all k
    ≤ j; one with the event leaves n_j − d_j as it was.
    """
    used = len(n)
    both = np.cumsum(1 / (n - d) - 1 / n)
    times, cells = np.arange(used)[:, None], np.arange(intervals)[None, :]
    reached = np.minimum(times, cells)
    made = np.repeat(both[reached][:, None, :], 2, axis=1)
    own = np.zeros(intervals)
    own[:used] = 1 / (n - d)
    made[:, 1] -= np.where(cells <= times, own, 0.0)
    return made


def _restricted(
    survival: Doubles, slopes: Doubles, n: Doubles, d: Doubles, noise: float, every: float, until: float
) -> dict[str, Any]:
    """The area below the curve up to `until`, which the curve has to reach."""
    used = len(n)
    if until > every * used + 1e-9:
        return {"until": until, "mean": None, "error": None, "interval": None}
    starts = every * np.arange(used + 1)
    widths = np.diff(np.minimum(np.append(starts, max(until, starts[-1])), until))
    areas = np.append(1.0, survival) * widths
    left = areas[::-1].cumsum()[::-1][1:]
    sampling = max(float((left**2 * d / (n * (n - d))).sum()), 0.0)
    by_count = np.tensordot(areas[1:], slopes, axes=1)
    error = math.sqrt(sampling + noise**2 * float((by_count**2).sum()))
    mean = float(areas.sum())
    return {
        "until": until,
        "mean": mean,
        "error": error,
        "interval": [mean - Q95 * error, mean + Q95 * error],
    }


def noisy_log_rank(leavers: Doubles, noise: float) -> dict[str, Any]:
    """The log-rank test of leavers [groups, 2, intervals] over the intervals in which each group's number at
    risk is known, with the variance of the noise beside the hypergeometric one."""
    groups = len(leavers)
    used = known_until(at_risk_of(leavers), noise)

    def apart(counts: Doubles) -> Doubles:
        risk, died = at_risk_of(counts)[:, :used], counts[:, 1, :used]
        share = risk / risk.sum(axis=0)
        found: Doubles = (died - share * died.sum(axis=0)).sum(axis=1)[:-1]
        return found

    freedom = groups - 1
    if not used:
        return {"chi2": None, "p": None, "df": freedom}
    risk, died = at_risk_of(leavers)[:, :used], leavers[:, 1, :used]
    whole, events = risk.sum(axis=0), died.sum(axis=0)
    share = risk / whole
    factor = events * (whole - events) / np.maximum(whole - 1, 1.0)
    variance = -(share * factor) @ share.T + np.diag((share * factor).sum(axis=1))
    slopes = derivatives(apart, leavers)
    variance = variance[:-1, :-1] + noise**2 * slopes @ slopes.T
    values, vectors = np.linalg.eigh(variance)
    if values[0] <= 0:
        return {"chi2": None, "p": None, "df": freedom}
    chi2 = float((vectors.T @ apart(leavers)) ** 2 @ (1 / values))
    return {"chi2": chi2, "p": float(stats.chi2.sf(chi2, freedom)), "df": freedom}


def derivatives(of: Callable[[Doubles], Doubles], counts: Doubles) -> Doubles:
    """Of a function by each count, [outputs, counts], by central differences of one count."""
    found = []
    for place in range(counts.size):
        ends = []
        for side in (0.5, -0.5):
            moved = counts.copy()
            moved.flat[place] += side
            ends.append(of(moved))
        found.append(ends[0] - ends[1])
    return np.array(found).T
