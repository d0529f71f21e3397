"""Kaplan-Meier curves with Greenwood's bands, and the log-rank test, of counts on a public grid of times.

A time counts as the end of its interval: results are exactly those of the pooled rows with times rounded up
to the grid. Intervals are merged until at least the least count of people leave each, in every group that
anybody leaves there; what is left over at the end joins the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.moments import or_none
from roundtable.core.analyses.question import DONE, TOO_FEW, Answer, Question, by_group, cells
from roundtable.core.analyses.scipy_parts import linalg, stats
from roundtable.core.analyses.survival.time_grid import TimeGrid, merged
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable


class KaplanMeier(Question):
    """The share of people without the event, by time, for each group; with two groups or more the log-rank
    test."""

    ask: ClassVar[str] = "survival"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        time: str,
        event: str,
        every: float,
        by: str | None = None,
        until: float | None = None,
    ) -> None:
        super().__init__(columns, least, title)
        self.time = time
        self.event = event
        self.by = by
        self.labels = self.category(by).labels if by is not None else ["all"]
        self._grid = TimeGrid(self, time, event, every)
        self.intervals = self._grid.intervals
        self.until = until
        most = self.number(time).most
        if until is not None and most is not None and until > most:
            raise ConfigError(
                f"{title}: until = {until:g} is after the last time, most = {most:g} of {time!r}"
            )

    @property
    def _shape(self) -> Shape:
        return (len(self.labels), self.intervals)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.time, self.event, *([self.by] if self.by is not None else []))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"events": self._shape, "leavers": self._shape}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {
            "events": self._shape,
            "leavers": self._shape,
            "ends": (self.intervals,),
            "used": (1,),
        }

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        values, died = table.column(self.time), table.column(self.event)
        place = self._grid.place(values)
        group = by_group(table, self.by, len(self.labels))
        known = np.where(np.isnan(died), np.nan, place)
        return {
            "leavers": cells([group, known], self._shape),
            "events": cells([group, np.where(died == 1, known, np.nan)], self._shape),
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        leavers, events = sums["leavers"], sums["events"]
        if (events > leavers).any():
            raise TaskError(f"{self.title}: more events than people in an interval: a silo's answer is wrong")
        if (leavers.sum(axis=1) < max(self.least, 1)).any():
            return {"stage": -float(TOO_FEW)}
        starts = merged(leavers, self.least)
        ends = np.zeros(self.intervals)
        ends[: len(starts)] = self._grid.ends(starts)
        kept = np.zeros((2, *self._shape))
        for place, each in enumerate((events, leavers)):
            kept[place, :, : len(starts)] = np.add.reduceat(each, starts, axis=1)
        return {
            "stage": DONE,
            "events": kept[0],
            "leavers": kept[1],
            "ends": ends,
            "used": np.array([float(len(starts))]),
        }

    @override
    def answer(self, public: Arrays) -> Answer:
        used = int(public["used"][0])
        ends, events, leavers = (public[name][..., :used] for name in ("ends", "events", "leavers"))
        at_risk = np.cumsum(leavers[:, ::-1], axis=1)[:, ::-1]
        rows: list[list[Any]] = []
        values: dict[str, Any] = {"merged": self.intervals - used, "curves": {}}
        notes = []
        for number, label in enumerate(self.labels):
            curve = _curve(ends, events[number], at_risk[number])
            values["curves"][label] = curve
            share = dict(zip(("survival", "lower", "upper"), curve["quartiles"], strict=True))
            rows.append(
                [label, int(at_risk[number][0]), int(events[number].sum()), curve["median"], *share.values()]
            )
        header = [
            self.by or "group",
            "rows",
            "events",
            "median",
            "at a quarter of it",
            "half",
            "three quarters",
        ]
        header[4:] = [f"S({end:g})" for end in _quarter_ends(ends)]
        if self.until is not None:
            header.append(f"mean until {self.until:g}")
            header.append("error")
            for row, curve, gone in zip(rows, values["curves"].values(), leavers, strict=True):
                last = float(ends[np.flatnonzero(gone)[-1]])
                curve["restricted"] = restricted_mean(curve, self.until, last)
                row += [curve["restricted"]["mean"], curve["restricted"]["error"]]
        if self.until is not None and len(self.labels) == 2:
            values["restricted_difference"] = _difference(
                *(curve["restricted"] for curve in values["curves"].values())
            )
            if (apart := values["restricted_difference"])["p"] is not None:
                low, high = apart["interval"]
                notes.append(
                    f"means until {self.until:g} differ by {apart['difference']:.6g} "
                    f"({low:.6g} to {high:.6g}), p {apart['p']:.4g}"
                )
        if len(self.labels) > 1:
            values["log_rank"] = log_rank(events, at_risk)
            test = values["log_rank"]
            if test["chi2"] is None:
                notes.append("no log-rank test: no events, or the groups are not at risk together")
            else:
                freedom = f"{test['df']} degrees of freedom, p {test['p']:.4g}"
                notes.append(f"log-rank chi-square {test['chi2']:.6g}, {freedom}")
        if values["merged"]:
            notes.append(
                f"{used} intervals, merged from {self.intervals}: at least {self.least} people leave each"
            )
        return Answer(self.title, self.ask, header, rows, values, notes=notes)


def _quarter_ends(ends: Doubles) -> list[float]:
    return [float(ends[min(len(ends) - 1, max(0, len(ends) * part // 4 - 1))]) for part in (1, 2, 3)]


def _curve(ends: Doubles, events: Doubles, at_risk: Doubles) -> dict[str, Any]:
    """Survival with log-log intervals of Greenwood's variance (Kalbfleisch & Prentice 2002, section 1.4)."""
    where = (events > 0) & (at_risk > 0)
    times, died, risk = ends[where], events[where], at_risk[where]
    survival = np.cumprod(1 - died / risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(died / (risk * (risk - died)))
        reach = stats.norm.ppf(0.975) * np.sqrt(variance) / np.log(survival)
        lower, upper = survival ** np.exp(-reach), survival ** np.exp(reach)
    half = np.flatnonzero(survival <= 0.5)

    def at(time: float) -> float:
        seen = np.flatnonzero(times <= time)
        return float(survival[seen[-1]]) if seen.size else 1.0

    return {
        "times": times.tolist(),
        "at_risk": [int(each) for each in risk],
        "events": [int(each) for each in died],
        "survival": survival.tolist(),
        "lower": [or_none(each) for each in lower],
        "upper": [or_none(each) for each in upper],
        "median": float(times[half[0]]) if half.size else None,
        "quartiles": [at(end) for end in _quarter_ends(ends)],
    }


def restricted_mean(curve: Mapping[str, Any], until: float, last: float) -> dict[str, Any]:
    """The mean time without the event up to `until`: the area below the curve, with its error and 95 %
    interval (Klein & Moeschberger 2003, section 4.5). None where people are followed up to `last` only, and
    not all have the event by then."""
    survival = np.array([1.0, *curve["survival"]])
    if until > last and survival[-1] > 0:
        return {"until": until, "mean": None, "error": None, "interval": None}
    times = np.array(curve["times"])
    widths = np.diff(np.minimum([0.0, *times, max(until, float(times.max(initial=0.0)))], until))
    areas = survival * widths
    # What is left of the area from each time on.
    left = areas[::-1].cumsum()[::-1][1:]
    died, risk = np.array(curve["events"], float), np.array(curve["at_risk"], float)
    seen = (times <= until) & (risk > died)
    variance = (left[seen] ** 2 * died[seen] / (risk[seen] * (risk[seen] - died[seen]))).sum()
    mean, error = float(areas.sum()), float(np.sqrt(variance))
    reach = float(stats.norm.ppf(0.975)) * error
    return {"until": until, "mean": mean, "error": error, "interval": [mean - reach, mean + reach]}


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The second group's restricted mean less the first's."""
    if one["mean"] is None or other["mean"] is None:
        return {"difference": None, "interval": None, "p": None}
    apart = other["mean"] - one["mean"]
    error = math.hypot(one["error"], other["error"])
    reach = float(stats.norm.ppf(0.975)) * error
    p = float(2 * stats.norm.sf(abs(apart) / error)) if error else None
    return {"difference": apart, "interval": [apart - reach, apart + reach], "p": p}


def log_rank(events: Doubles, at_risk: Doubles) -> dict[str, Any]:
    """The log-rank test of groups [groups, times], with the hypergeometric variance."""
    risk, died = at_risk.sum(axis=0), events.sum(axis=0)
    there = (risk > 1) & (died > 0)
    risk, died = risk[there], died[there]
    share = at_risk[:, there] / risk
    observed = events[:, there].sum(axis=1) - (share * died).sum(axis=1)
    factor = died * (risk - died) / (risk - 1)
    variance = -(share * factor) @ share.T
    variance[np.diag_indices(len(variance))] += (share * factor).sum(axis=1)
    freedom = len(events) - 1
    kept = variance[:-1, :-1]
    if np.linalg.matrix_rank(kept, hermitian=True) != freedom:
        return {"chi2": None, "p": None, "df": freedom}
    chi2 = float(observed[:-1] @ linalg.solve(kept, observed[:-1], assume_a="pos"))
    return {"chi2": chi2, "p": float(stats.chi2.sf(chi2, freedom)), "df": freedom}
