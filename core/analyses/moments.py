"""Counts, missing values, means and variances, by group; t-tests and the analysis of variance.

Two passes: sums about the middle of the column's range give the mean, sums about that mean the variance, with
the correction for the mean's own rounding (Chan, Golub & LeVeque 1983, equation 1.7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import (
    DONE,
    HIDDEN,
    ROUNDED,
    TOO_FEW,
    Answer,
    Question,
    by_group,
    cells,
    silos_of,
    unresolved,
)
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_AS_TOLD = ", or spread over too little of the stated range: no test compares them"


class Describe(Question):
    """Rows, missing values, mean and standard deviation of columns, for each group."""

    ask: ClassVar[str] = "describe"
    most_rounds: ClassVar[int] = 3

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        of: tuple[str, ...],
        by: str | None = None,
    ) -> None:
        super().__init__(columns, least, title)
        self.of = of
        self.by = by
        self.labels = self.category(by).labels if by is not None else ["all"]
        ranges = [self.number(name) for name in of]
        self._middle = np.array([each.middle for each in ranges])
        self._half = np.array([each.half for each in ranges])

    @property
    def _shape(self) -> Shape:
        return (len(self.labels), len(self.of))

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
    def counts(self) -> Mapping[str, Shape]:
        return {"present": self._shape, "missing": self._shape}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {"first": self._shape, "second": self._shape}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return dict.fromkeys(("present", "missing", "mean", "first", "second"), self._shape)

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        group = by_group(table, self.by, len(self.labels))
        made = {name: np.zeros(self._shape) for name in ("present", "missing", "first", "second")}
        for place, name in enumerate(self.of):
            values = table.column(name)
            lost = np.isnan(values)
            if stage == 0:
                made["present"][:, place] = cells([np.where(lost, np.nan, group)], (len(self.labels),))
                made["missing"][:, place] = cells([np.where(lost, group, np.nan)], (len(self.labels),))
                continue
            for number in range(len(self.labels)):
                if public["present"][number, place] < self.least:
                    continue
                about = self._middle[place] if stage == 1 else public["mean"][number, place]
                away = (values[(group == number) & ~lost] - about) / self._half[place]
                made["first"][number, place] = away.sum()
                made["second"][number, place] = (away**2).sum() if stage == 2 else 0.0
        wanted = ("present", "missing") if stage == 0 else ("first", "second")
        return {name: made[name] for name in wanted}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            # The same without groups tells the sums over them, and with them those of a hidden one.
            present, missing = (self.hide_cells(sums[name], (0,)) for name in ("present", "missing"))
            after = 1.0 if (present >= self.least).any() else DONE
            return {"stage": after, "present": present, "missing": missing}
        many = np.maximum(public["present"], 1.0)
        # Of values within the range, scaled to ± 1; about their mean they are within ± 2.
        self.check_possible(sums["first"], stage * many)
        self.check_possible(sums["second"] - 2 * many, 2 * many)
        if stage == 1:
            return {"stage": 2.0, "mean": self._middle + self._half * sums["first"] / many}
        return {"stage": DONE, "first": sums["first"], "second": sums["second"]}

    def figures(self, public: Arrays) -> tuple[Doubles, Doubles, Doubles]:
        """(n, mean, sum of squares about the mean) [groups, columns]; NaN where they are hidden."""
        present = np.where(public["present"] < self.least, np.nan, public["present"])
        mean = public["mean"] + self._half * public["first"] / present
        squares = self._half**2 * (public["second"] - public["first"] ** 2 / present)
        return present, mean, squares

    def spread(self, public: Arrays) -> Doubles:
        """The sums of squares about the mean in halves of ranges [groups, columns]; NaN where hidden."""
        present = np.where(public["present"] < self.least, np.nan, public["present"])
        found: Doubles = public["second"] - public["first"] ** 2 / present
        return found

    def _rounding(self, public: Arrays) -> list[str]:
        """A note for each column whose standard deviations the sums do not tell to 1e-8."""
        notes, silos, n = [], silos_of(public), public["present"]
        coarse = (n > 1) & (n >= self.least) & unresolved(self.spread(public), silos)
        for place in np.flatnonzero(coarse.any(axis=0)):
            fewest = n[coarse[:, place], place].min()
            within = self._half[place] * np.sqrt(silos * ROUNDED / (fewest - 1))
            notes.append(
                f"{self.of[place]}: a standard deviation so small beside the stated range is known within ± "
                f"{within:.2g}; a narrower least and most tells more"
            )
        return notes

    @override
    def answer(self, public: Arrays) -> Answer:
        n, mean, squares = self.figures(public)
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = np.maximum(squares, 0.0) / np.where(n > 1, n - 1, np.nan)
        header = ["column", *([self.by] if self.by is not None else [])]
        header += ["rows", "missing", "mean", "sd"]
        rows: list[list[Any]] = []
        values: dict[str, Any] = {}
        for place, name in enumerate(self.of):
            for number, label in enumerate(self.labels):
                at = number, place
                figures = {
                    "count": shown_count(public["present"][at]),
                    "missing": shown_count(public["missing"][at]),
                    "mean": or_none(mean[at]),
                    "variance": or_none(variance[at]),
                    "sd": or_none(np.sqrt(variance[at])),
                }
                values.setdefault(name, {})[label] = figures
                group = [label] if self.by is not None else []
                kept = [figures[key] for key in ("count", "missing", "mean", "sd")]
                rows.append([name, *group, *kept])
        hidden = sum(int((public[name] == HIDDEN).sum()) for name in ("present", "missing"))
        notes = self._rounding(public)
        return Answer(self.title, self.ask, header, rows, values, hidden=hidden, notes=notes)


class _Compared(Describe):
    """A column whose groups are compared: without one of them there is no answer; the test's outcome."""

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    def _groups_needed(self) -> int:
        return len(self.labels)

    def _alike(self, public: Arrays) -> bool:
        """Whether no group's values differ, as far as the sums tell."""
        return bool(unresolved(self.spread(public)[:, 0].sum(), silos_of(public)))

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        found = super().step(public, sums, stage)
        if stage == 0 and (found["present"] < self.least).any():
            found["stage"] = -float(TOO_FEW)
        return found


class TTest(_Compared):
    """Student's and Welch's t-test of a column between two groups, the first minus the second."""

    ask: ClassVar[str] = "t_test"

    @override
    def answer(self, public: Arrays) -> Answer:
        if self._alike(public):
            return Answer(self.title, self.ask, why=f"both groups are constant{_AS_TOLD}")
        n, mean, squares = (each[:, 0] for each in self.figures(public))
        difference = float(mean[0] - mean[1])
        parts = squares / (n - 1) / n
        pooled = float(squares.sum() / (n.sum() - 2) * (1 / n).sum())
        tests = {
            "student": (pooled, float(n.sum() - 2)),
            "welch": (float(parts.sum()), float(parts.sum() ** 2 / (parts**2 / (n - 1)).sum())),
        }
        values: dict[str, Any] = {"difference": difference, "groups": self.labels, "means": mean.tolist()}
        rows = []
        for name, (variance, freedom) in tests.items():
            error = float(np.sqrt(variance))
            t = difference / error
            reach = float(stats.t.ppf(0.975, freedom)) * error
            p = float(2 * stats.t.sf(abs(t), freedom))
            values[name] = {
                "t": float(t),
                "df": freedom,
                "p": p,
                "interval": [difference - reach, difference + reach],
            }
            rows.append([name, difference, difference - reach, difference + reach, t, freedom, p])
        header = ["test", f"{self.labels[0]} − {self.labels[1]}", "95 % from", "to", "t", "df", "p"]
        return Answer(self.title, self.ask, header, rows, values)


class Anova(_Compared):
    """One-way analysis of variance of a column between groups."""

    ask: ClassVar[str] = "anova"

    @override
    def answer(self, public: Arrays) -> Answer:
        if self._alike(public):
            return Answer(self.title, self.ask, why=f"every group is constant{_AS_TOLD}")
        n, mean, squares = (each[:, 0] for each in self.figures(public))
        grand = (n * mean).sum() / n.sum()
        between, within = float((n * (mean - grand) ** 2).sum()), float(squares.sum())
        one, two = len(n) - 1, float(n.sum() - len(n))
        f = between / one / (within / two)
        p = float(stats.f.sf(f, one, two))
        values = {"F": f, "p": p, "df": [one, two], "between": between, "within": within}
        return Answer(self.title, self.ask, ["F", "df", "df within", "p"], [[f, one, two, p]], values)


def or_none(value: Any) -> float | None:
    """A number, or None for one that is not defined."""
    return float(value) if np.isfinite(value) else None


def shown_count(value: Any) -> int | None:
    """A count, or None for one that is hidden."""
    return None if value == HIDDEN else int(value)
