"""What is counted on a public grid: histograms, and tables of two categories with their test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.moments import shown_count
from roundtable.core.analyses.question import DONE, HIDDEN, Answer, Question, by_group, cells
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable


class ColumnHistogram(Question):
    """Rows in each of `bins` bins of equal width over a column's range, the last one closed, by group."""

    ask: ClassVar[str] = "histogram"
    tells_counts_alone: ClassVar[bool] = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        column: str,
        bins: int,
        by: str | None = None,
    ) -> None:
        super().__init__(columns, least, title)
        self.column = column
        self.bins = bins
        self.by = by
        self.labels = self.category(by).labels if by is not None else ["all"]
        span = self.number(column)
        self.edges = np.linspace(float(span.least or 0.0), float(span.most or 0.0), bins + 1)

    @property
    def _shape(self) -> Shape:
        return (len(self.labels), self.bins)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.column, *([self.by] if self.by is not None else []))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"cells": self._shape}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"cells": self._shape}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        values = table.column(self.column)
        place: Doubles = np.searchsorted(self.edges, values, side="right").astype(np.float64) - 1.0
        place = np.where(values == self.edges[-1], self.bins - 1.0, place)
        place = np.where(np.isnan(values), np.nan, place)
        return {"cells": cells([by_group(table, self.by, len(self.labels)), place], self._shape)}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        # The same histogram without groups, or of rows by group, tells each sum.
        return {"stage": DONE, "cells": self.hide_cells(sums["cells"], (0, 1))}

    @override
    def answer(self, public: Arrays) -> Answer:
        counted = [[shown_count(value) for value in row] for row in public["cells"]]
        header = [f"{self.column} from", "to", *(self.labels if self.by is not None else ["rows"])]
        rows = [
            [float(low), float(high), *(row[place] for row in counted)]
            for place, (low, high) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True))
        ]
        values = {"edges": self.edges.tolist(), "counts": dict(zip(self.labels, counted, strict=True))}
        return Answer(
            self.title, self.ask, header, rows, values, hidden=int((public["cells"] == HIDDEN).sum())
        )


class Contingency(Question):
    """Rows in each cell of two categories, and Pearson's chi-square test of their independence."""

    ask: ClassVar[str] = "table"
    tells_counts_alone: ClassVar[bool] = True

    def __init__(
        self, columns: Mapping[str, ColumnTable], least: int, title: str, rows: str, across: str, yates: bool
    ) -> None:
        super().__init__(columns, least, title)
        self.rows = rows
        self.across = across
        self.yates = yates
        self._labels = [self.category(name).labels for name in (rows, across)]

    @property
    def _shape(self) -> Shape:
        return (len(self._labels[0]), len(self._labels[1]))

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.rows, self.across)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"cells": self._shape}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"cells": self._shape}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        return {"cells": cells([table.column(self.rows), table.column(self.across)], self._shape)}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        return {"stage": DONE, "cells": self.hide_cells(sums["cells"], (0, 1))}

    @override
    def answer(self, public: Arrays) -> Answer:
        counted = public["cells"]
        down, across = self._labels
        rows = [
            [label, *(shown_count(value) for value in line)]
            for label, line in zip(down, counted, strict=True)
        ]
        values: dict[str, Any] = {"rows": down, "columns": across, "counts": [row[1:] for row in rows]}
        hidden, notes = int((counted == HIDDEN).sum()), []
        if hidden:
            notes.append("no test: it would tell of the cells that are hidden; merge values with few rows")
        elif (counted.sum(axis=0) == 0).any() or (counted.sum(axis=1) == 0).any():
            notes.append("no test: a value occurs in no row")
        else:
            chi2, p, freedom, expected = stats.chi2_contingency(counted, correction=self.yates)
            values |= {"chi2": float(chi2), "p": float(p), "df": int(freedom), "expected": expected.tolist()}
            note = f"chi-square {chi2:.6g}, {freedom} degrees of freedom, p {p:.4g}"
            fewest = float(expected.min())
            notes.append(
                note if fewest >= 5 else f"{note}; a cell is expected to hold only {fewest:.2g} rows"
            )
        return Answer(self.title, self.ask, [self.rows, *across], rows, values, hidden=hidden, notes=notes)
