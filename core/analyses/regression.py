"""Linear and logistic regression: what a silo sends of its rows, and what is solved from the sums.

Columns are centred at the pooled mean and divided by the pooled standard deviation, which two rounds of sums
give: the condition of the sums is then that of the correlations, whatever the units. Categories enter as one
column for each value but the first. Rows with a missing value in a column that is used are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows, coefficients, inverted, solve
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import (
    DONE,
    SATURATED,
    SEPARATED,
    SINGULAR,
    TOO_FEW,
    Answer,
    Question,
    silos_of,
    unresolved,
)
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_ROWS_EACH = 3


class Regression(Question):
    """What both have in common: the design, its counts, and the two rounds that standardise it."""

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
    ) -> None:
        super().__init__(columns, least, title)
        self.outcome = outcome
        self.on = on
        self.terms: list[str] = []
        self._middle: list[float] = []
        self._half: list[float] = []
        self._levels: list[tuple[str, int]] = []
        for name in on:
            found = self.described(name)
            if found.kind == "category":
                labels = self.category(name).labels
                self._levels += [(name, level) for level in range(len(labels))]
                self.terms += [f"{name}={label}" for label in labels[1:]]
                self._middle += [0.5] * (len(labels) - 1)
                self._half += [0.5] * (len(labels) - 1)
            else:
                self.terms.append(name)
                self._middle.append(self.number(name).middle)
                self._half.append(self.number(name).half)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.outcome, *self.on)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome,)

    @property
    def _width(self) -> int:
        """Columns whose moments are summed."""
        return len(self.terms)

    @property
    def halves(self) -> Doubles:
        """Half of the range of each term, float64 [terms]."""
        return np.array(self._half)

    def _design(self, table: DataTable) -> tuple[Doubles, Doubles]:
        """(design [rows, terms], outcome [rows]) of the whole rows."""
        parts = []
        for name in self.on:
            values = table.column(name)
            if self.columns[name].kind == "category":
                levels = range(1, len(self.columns[name].values))
                parts += [np.where(np.isnan(values), np.nan, values == level) for level in levels]
            else:
                parts.append(values)
        design, outcome = np.column_stack(parts), table.column(self.outcome)
        whole = ~(np.isnan(design).any(axis=1) | np.isnan(outcome))
        return design[whole], outcome[whole]

    def _level_counts(self, table: DataTable) -> Doubles:
        whole = ~np.isnan(table.matrix(self.names)).any(axis=1)
        return np.array(
            [float((table.column(name)[whole] == level).sum()) for name, level in self._levels] or [0.0]
        )

    def _enough(self, rows: float, levels: Doubles) -> int:
        """0, or why these counts are too few."""
        if rows < max(self.least, 1) or (self._levels and (levels < self.least).any()):
            return TOO_FEW
        return SATURATED if rows < _ROWS_EACH * (len(self.terms) + 1) else 0

    @override
    def blame(self, public: Arrays, code: int) -> str:
        place = int(public["blame"][0])
        return (
            f": {[*self.terms, self.outcome][place]!r}"
            if code in (SINGULAR, SEPARATED) and place >= 0
            else ""
        )


class Linear(Regression):
    """Ordinary least squares with an intercept."""

    ask: ClassVar[str] = "linear"
    most_rounds: ClassVar[int] = 4

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        found = self.number(outcome)
        self._middles = np.array([*self._middle, found.middle])
        self._halves = np.array([*self._half, found.half])

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (1,), "levels": (max(1, len(self._levels)),)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        width = self._width + 1
        return {"first": (width,), "second": (width, width), "residual": (2,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        width = self._width + 1
        return {
            "rows": (1,),
            "mean": (width,),
            "gram": (width, width),
            "slopes": (self._width,),
            "residual": (2,),
            "blame": (1,),
        }

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        design, outcome = self._design(table)
        if stage == 0:
            return {"rows": np.array([float(len(outcome))]), "levels": self._level_counts(table)}
        both = np.column_stack([design, outcome])
        if stage == 1:
            return {"first": ((both - self._middles) / self._halves).sum(axis=0)}
        away = (both - public["mean"]) / self._halves
        if stage == 2:
            return {"first": away.sum(axis=0), "second": away.T @ away}
        left = away[:, -1] - away[:, :-1] @ public["slopes"]
        return {"residual": np.array([left.sum(), (left**2).sum()])}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            rows = float(sums["rows"][0])
            code = self._enough(rows, sums["levels"])
            return {"stage": -float(code) if code else 1.0, "rows": self.hide(sums["rows"])}
        rows = float(public["rows"][0])
        if stage == 1:
            return {"stage": 2.0, "mean": self._middles + self._halves * sums["first"] / rows}
        return (
            {"stage": DONE, "residual": sums["residual"]} if stage == 3 else self._solved(public, sums, rows)
        )

    def _solved(self, public: Arrays, sums: Arrays, total: float) -> dict[str, Any]:
        """The slopes from moments about nearly the means, of rows whose weights add up to this."""
        gram = sums["second"] - np.outer(sums["first"], sums["first"]) / total
        mean = public["mean"] + self._halves * sums["first"] / total
        lost = np.flatnonzero(unresolved(np.diag(gram), silos_of(public)))
        if lost.size:
            return {"stage": -float(SINGULAR), "blame": lost[:1].astype(np.float64)}
        solved, place = self.fitted(gram, total)
        if solved is None:
            return {"stage": -float(SINGULAR), "blame": np.array([float(place)])}
        return {"stage": 3.0, "gram": gram, "mean": mean, "slopes": solved}

    def fitted(self, gram: Doubles, rows: float) -> tuple[Doubles | None, int]:
        """The slopes, in halves of ranges, from centred cross products of columns and outcome; or None and
        the place of the column that leaves them open."""
        return solve(gram[:-1, :-1], gram[:-1, -1])

    @override
    def answer(self, public: Arrays) -> Answer:
        rows = float(public["rows"][0])
        values = self._figures(public, rows, 0.0)
        scale, explained = values["scale"], values["r_squared"]
        notes = [f"{int(rows)} rows, R² {explained:.4g}, residual standard deviation {np.sqrt(scale):.5g}"]
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)

    def _figures(self, public: Arrays, total: float, logs: float) -> dict[str, Any]:
        """What the answer says, of rows whose weights add up to `total` and their logarithms to `logs`; the
        scale is that of a row of weight 1."""
        rows, p = float(public["rows"][0]), self._width
        halves, spread = self._halves[:-1], self._halves[-1]
        slopes, means = public["slopes"] * spread / halves, public["mean"]
        residual = (public["residual"][1] - public["residual"][0] ** 2 / total) * spread**2
        freedom = rows - p - 1
        scale = residual / freedom
        inverse = inverted(public["gram"][:-1, :-1]) / np.outer(halves, halves)
        around = float(public["gram"][-1, -1]) * spread**2
        first = float(means[-1] - slopes @ means[:-1] + public["residual"][0] * spread / total)
        error0 = scale * (1 / total + means[:-1] @ inverse @ means[:-1])
        estimates = np.array([first, *slopes])
        errors = np.sqrt(np.array([error0, *(scale * np.diag(inverse))]))
        explained = 1 - residual / around
        f = (around - residual) / p / scale
        loglik = -rows / 2 * (np.log(2 * np.pi) + np.log(residual / rows) + 1) + logs / 2
        return {
            "n": int(rows),
            **coefficients(["intercept", *self.terms], estimates, errors, freedom),
            "scale": float(scale),
            "r_squared": float(explained),
            "r_squared_adjusted": float(1 - (1 - explained) * (rows - 1) / freedom),
            "F": float(f),
            "F_p": float(stats.f.sf(f, p, freedom)),
            "log_likelihood": float(loglik),
            "aic": float(2 * (p + 1) - 2 * loglik),
            "bic": float(np.log(rows) * (p + 1) - 2 * loglik),
        }
