"""Counts, missing values, means and standard deviations under noise, by group; the difference of two means.

Of a column that is scaled to [-1, 1] a silo adds up, by group: present and missing rows (a row is in one of
these cells), x, and x² − 1/2, which a row changes by 1/2 at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.noisy.noisy_question import (
    Q95,
    NoisyQuestion,
    SumBlock,
    as_places,
    count_interval,
    count_notes,
    counted,
    ratio_interval,
)
from roundtable.core.analyses.question import Answer, by_group
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_FEWEST = 4.0
"""Standard deviations of its noise that a count of rows has to reach before a mean over them is told."""


@dataclass(frozen=True)
class NoisyMoments:
    """Of one column in one group, in the column's units; None for what the noise does not leave.

    `mean_interval` is always there: the column's whole range where nothing is known. `mean_error` is of noise
    and sampling.
    """

    count: float
    count_noise: float
    missing: float
    mean: float | None
    mean_error: float | None
    mean_interval: tuple[float, float]
    sd: float | None
    sd_interval: tuple[float, float]


class NoisyDescribe(NoisyQuestion):
    """Rows, missing values, mean and standard deviation of columns, for each group, with 95 % intervals."""

    ask: ClassVar[str] = "describe"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, of: tuple[str, ...], by: str | None
    ) -> None:
        super().__init__(columns, title)
        self.of = of
        self.by = by
        self.labels = self.category(by).labels if by is not None else ["all"]
        self._ranges = [self.number(name) for name in of]

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (*self.of, *([self.by] if self.by is not None else []))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return () if self.by is None else (self.by,)

    @property
    @override
    def blocks(self) -> Mapping[str, SumBlock]:
        groups = len(self.labels)
        made = {}
        for place in range(len(self.of)):
            made[f"rows{place}"] = SumBlock((groups, 2), 1.0)
            made[f"first{place}"] = SumBlock((groups,), 1.0)
            made[f"second{place}"] = SumBlock((groups,), 0.5)
        return made

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        groups = len(self.labels)
        group = by_group(table, self.by, groups)
        made = {}
        for place, (name, span) in enumerate(zip(self.of, self._ranges, strict=True)):
            values = table.column(name)
            lost = np.isnan(values)
            made[f"rows{place}"] = as_places(lost.astype(np.float64), group, (groups, 2))
            whole = ~(lost | np.isnan(group))
            of, x = group[whole].astype(np.int64), in_range(values[whole], span)
            made[f"first{place}"] = np.bincount(of, x, groups).astype(np.float64)
            made[f"second{place}"] = np.bincount(of, x * x - 0.5, groups).astype(np.float64)
        return made

    def moments(self, public: Arrays, place: int, group: int) -> NoisyMoments:
        """What is known of one column in one group."""
        silos, span = self.silos(public), self._ranges[place]
        n, missing = (float(each) for each in public[f"rows{place}"][group])
        total, squares = float(public[f"first{place}"][group]), float(public[f"second{place}"][group])
        noises = [self.spread(f"{block}{place}", silos) for block in ("rows", "first", "second")]
        if n < _FEWEST * noises[0]:
            whole = (span.middle - span.half, span.middle + span.half)
            return NoisyMoments(n, noises[0], missing, None, None, whole, None, (0.0, span.half))
        mean = min(max(total / n, -1.0), 1.0)
        variance = squares / n + 0.5 - mean**2
        likely = min(max(variance, 0.0), 1.0 - mean**2)
        low, high = ratio_interval(total, n, noises[1], noises[0], likely)
        error = math.sqrt(n * likely + noises[1] ** 2 + mean**2 * noises[0] ** 2) / n
        spread = _variance_error(n, mean, likely, squares, noises)
        ends = [span.half * math.sqrt(min(max(variance + side * Q95 * spread, 0.0), 1.0)) for side in (-1, 1)]
        return NoisyMoments(
            count=n,
            count_noise=noises[0],
            missing=missing,
            mean=span.middle + span.half * mean,
            mean_error=span.half * error,
            mean_interval=(span.middle + span.half * low, span.middle + span.half * high),
            sd=span.half * math.sqrt(min(variance, 1.0)) if variance > 0 else None,
            sd_interval=(ends[0], ends[1]),
        )

    @override
    def answer(self, public: Arrays) -> Answer:
        header = ["column", *([self.by] if self.by is not None else [])]
        header += ["rows", "missing", "mean", "95 % from", "to", "sd", "95 % from", "to"]
        rows: list[list[Any]] = []
        values: dict[str, Any] = {}
        every: list[float] = []
        lost = flat = 0
        for place, name in enumerate(self.of):
            for number, label in enumerate(self.labels):
                found = self.moments(public, place, number)
                every += [found.count, found.missing]
                lost += found.mean is None
                flat += found.mean is not None and found.sd is None
                values.setdefault(name, {})[label] = {
                    "count": found.count,
                    "count_interval": count_interval(found.count, found.count_noise),
                    "missing": found.missing,
                    "missing_interval": count_interval(found.missing, found.count_noise),
                    "mean": found.mean,
                    "mean_error": found.mean_error,
                    "mean_interval": list(found.mean_interval),
                    "sd": found.sd,
                    "sd_interval": list(found.sd_interval),
                }
                group = [label] if self.by is not None else []
                shown = [counted(found.count), counted(found.missing), found.mean, *found.mean_interval]
                rows.append([name, *group, *shown, found.sd, *found.sd_interval])
        notes = count_notes(np.array(every), self.spread("rows0", self.silos(public)))
        if lost:
            notes.append(
                f"{lost} means are not told: so few rows that the noise hides how many; their interval is "
                "all that the column's range allows"
            )
        if flat:
            notes.append(f"{flat} standard deviations are not told: the noise took the variance below 0")
        return Answer(self.title, self.ask, header, rows, values, notes=notes)


class NoisyTTest(NoisyDescribe):
    """The difference of a column's means between two groups, the first minus the second, with a test that
    counts the noise in.

    The interval joins those of the two means (Zou & Donner 2008, equation 3); p is the normal distribution's.
    """

    ask: ClassVar[str] = "t_test"

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @override
    def answer(self, public: Arrays) -> Answer:
        found = [self.moments(public, 0, group) for group in (0, 1)]
        if found[0].mean is None or found[1].mean is None:
            why = "so few rows in one of the groups that the noise hides how many: ask with more epsilon"
            return Answer(self.title, self.ask, why=why)
        one, two = found[0].mean, found[1].mean
        difference = one - two
        (low1, high1), (low2, high2) = found[0].mean_interval, found[1].mean_interval
        low = difference - math.hypot(one - low1, high2 - two)
        high = difference + math.hypot(high1 - one, two - low2)
        error = math.hypot(found[0].mean_error or 0.0, found[1].mean_error or 0.0)
        p = float(2 * stats.norm.sf(abs(difference) / error))
        values = {
            "difference": difference,
            "error": error,
            "interval": [low, high],
            "p": p,
            "groups": self.labels,
            "means": [one, two],
            "counts": [each.count for each in found],
        }
        header = [f"{self.labels[0]} − {self.labels[1]}", "error", "95 % from", "to", "p"]
        notes = ["error, interval and p count the noise in"]
        return Answer(self.title, self.ask, header, [[difference, error, low, high, p]], values, notes=notes)


def in_range(values: Doubles, span: ColumnTable) -> Doubles:
    """Values scaled so that the column's range is [-1, 1], and what lies beyond is at its end."""
    scaled: Doubles = np.clip((values - span.middle) / span.half, -1.0, 1.0)
    return scaled


def _variance_error(n: float, mean: float, variance: float, squares: float, noises: list[float]) -> float:
    """Standard error of a scaled variance: its noise to first order, and of sampling the most that values in
    [-1, 1] allow, since (x − m)⁴ is at most (1 + |m|)² (x − m)²."""
    count, first, second = noises
    noise = second**2 + (2 * mean * first) ** 2 + ((2 * mean**2 - squares / n) * count) ** 2
    sampling = n * max((1 + abs(mean)) ** 2 * variance - variance**2, 0.0)
    return math.sqrt(noise + sampling) / n
