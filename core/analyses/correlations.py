"""Covariances and correlations of columns, over the rows in which none of them is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.moments import or_none
from roundtable.core.analyses.question import DONE, TOO_FEW, Answer, Question, silos_of, unresolved
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable


class Correlation(Question):
    """The covariance matrix of columns, and Pearson's correlations."""

    ask: ClassVar[str] = "correlation"
    most_rounds: ClassVar[int] = 3

    def __init__(
        self, columns: Mapping[str, ColumnTable], least: int, title: str, of: tuple[str, ...]
    ) -> None:
        super().__init__(columns, least, title)
        self.of = of
        ranges = [self.number(name) for name in of]
        self._middle = np.array([each.middle for each in ranges])
        self._half = np.array([each.half for each in ranges])

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return self.of

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (1,)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {"first": (len(self.of),), "second": (len(self.of), len(self.of))}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"rows": (1,), "mean": (len(self.of),), **self.reals}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        values = table.matrix(self.of)
        values = values[~np.isnan(values).any(axis=1)]
        if stage == 0:
            return {"rows": np.array([float(len(values))])}
        if stage == 1:
            return {"first": ((values - self._middle) / self._half).sum(axis=0)}
        away = (values - public["mean"]) / self._half
        return {"first": away.sum(axis=0), "second": away.T @ away}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            few = float(sums["rows"][0]) < max(self.least, 2)
            return {"stage": -float(TOO_FEW) if few else 1.0, "rows": self.hide(sums["rows"])}
        if stage == 1:
            rows = float(public["rows"][0])
            return {"stage": 2.0, "mean": self._middle + self._half * sums["first"] / rows}
        return {"stage": DONE, "first": sums["first"], "second": sums["second"]}

    @override
    def answer(self, public: Arrays) -> Answer:
        rows, first = float(public["rows"][0]), public["first"]
        squares = public["second"] - np.outer(first, first) / rows
        covariance = squares * np.outer(self._half, self._half) / (rows - 1)
        lost = unresolved(np.diag(squares), silos_of(public))
        scale = np.sqrt(np.where(lost, np.nan, np.diag(squares)))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = squares / np.outer(scale, scale)
        shown = [[or_none(value) for value in line] for line in found]
        values = {
            "n": int(rows),
            "columns": list(self.of),
            "covariance": covariance.tolist(),
            "correlation": shown,
        }
        table = [[name, *line] for name, line in zip(self.of, shown, strict=True)]
        notes = [f"{int(rows)} rows without a missing value"]
        if lost.any():
            names = ", ".join(name for name, each in zip(self.of, lost, strict=True) if each)
            notes.append(f"{names}: constant, or spread over too little of the stated range")
        return Answer(self.title, self.ask, ["correlation", *self.of], table, values, notes=notes)
