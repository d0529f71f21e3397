"""Counts in stated cells under noise: histograms, contingency tables, frequent values.

A row is in one cell at most, so it changes all counts together by 1, however many cells there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.counted_cells import ColumnHistogram, Contingency
from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.noisy.noisy_question import (
    NoisyQuestion,
    SumBlock,
    as_places,
    count_interval,
    count_notes,
    counted,
)
from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.ranked_values import TopValues
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_DRAWS = 999
_FEWEST_EXPECTED = 5.0


class NoisyHistogram(NoisyQuestion):
    """Rows in each bin of equal width over a column's range, by group."""

    ask: ClassVar[str] = "histogram"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, column: str, bins: int, by: str | None
    ) -> None:
        super().__init__(columns, title)
        self._exact = ColumnHistogram(columns, 1, title, column, bins, by)
        self._span = self.number(column)

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
        return {"cells": SumBlock(self._exact.counts["cells"], 1.0)}

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        exact = self._exact
        values = np.clip(table.column(exact.column), exact.edges[0], exact.edges[-1])
        place = np.minimum(np.searchsorted(exact.edges, values, side="right") - 1.0, exact.bins - 1.0)
        place = np.where(np.isnan(values), np.nan, place)
        group = table.column(exact.by) if exact.by is not None else None
        return {"cells": as_places(place, group, (len(exact.labels), exact.bins))}

    @override
    def answer(self, public: Arrays) -> Answer:
        exact, cells = self._exact, public["cells"]
        noise = self.spread("cells", self.silos(public))
        shown = [[counted(value) for value in line] for line in cells]
        header = [f"{exact.column} from", "to", *(exact.labels if exact.by is not None else ["rows"])]
        rows = [
            [float(low), float(high), *(line[place] for line in shown)]
            for place, (low, high) in enumerate(zip(exact.edges[:-1], exact.edges[1:], strict=True))
        ]
        values = {
            "edges": exact.edges.tolist(),
            "counts": dict(zip(exact.labels, cells.tolist(), strict=True)),
            "intervals": {
                label: [count_interval(value, noise) for value in line]
                for label, line in zip(exact.labels, cells, strict=True)
            },
        }
        return Answer(self.title, self.ask, header, rows, values, notes=count_notes(cells, noise))


class NoisyContingency(NoisyQuestion):
    """Rows in each cell of two categories, and a chi-square test of independence that counts the noise in.

    p is that of the same statistic over tables drawn at random from the margins, with noise as large
    (Gaboardi, Lim, Rogers & Vadhan 2016, Monte Carlo independence test): the chi-square distribution itself
    would find dependence in noise.
    """

    ask: ClassVar[str] = "table"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, rows: str, across: str, yates: bool
    ) -> None:
        super().__init__(columns, title)
        self._exact = Contingency(columns, 1, title, rows, across, yates)
        self._labels = [self.category(name).labels for name in (rows, across)]
        self._yates = yates

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
        return {"cells": SumBlock(self._exact.counts["cells"], 1.0)}

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        return self._exact.sums(table, {}, 0)

    @override
    def answer(self, public: Arrays) -> Answer:
        cells, (down, across) = public["cells"], self._labels
        noise = self.spread("cells", self.silos(public))
        rows = [[label, *map(counted, line)] for label, line in zip(down, cells, strict=True)]
        values: dict[str, Any] = {
            "rows": down,
            "columns": across,
            "counts": cells.tolist(),
            "intervals": [[count_interval(value, noise) for value in line] for line in cells],
        }
        notes = count_notes(cells, noise)
        tested = independence(cells, noise)
        if tested is None:
            notes.append(
                f"no test: beside the noise a cell is not expected to hold {_FEWEST_EXPECTED:g} rows"
            )
        else:
            values |= {"chi2": tested[0], "p": tested[1]}
            notes.append(
                f"chi-square {tested[0]:.6g}, p {tested[1]:.4g} among independent tables with as much noise"
            )
        if self._yates:
            notes.append("Yates' correction is of counts without noise, and not made")
        return Answer(self.title, self.ask, [self._exact.rows, *across], rows, values, notes=notes)


class NoisyTopValues(NoisyQuestion):
    """The values of a stated domain with the largest noisy counts.

    Values are told only where their count is above what the noise gives an empty domain in 95 of 100 surveys.
    """

    ask: ClassVar[str] = "top_values"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, column: str, most: int, every: float | None
    ) -> None:
        super().__init__(columns, title)
        self._exact = TopValues(columns, 1, title, column, most, every)

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
        return {"cells": SumBlock((self._exact.grid.size,), 1.0)}

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        span = self.columns[self._exact.column]
        if span.kind == "number":
            held = np.clip(table.column(self._exact.column), span.least, span.most)
            table = DataTable({self._exact.column: held}, table.descriptions)
        return self._exact.sums(table, {}, 0)

    @override
    def answer(self, public: Arrays) -> Answer:
        cells, exact = public["cells"], self._exact
        noise = self.spread("cells", self.silos(public))
        # Of so many normal draws the largest is below with probability 0.95.
        above = noise * highest_of(len(cells))
        first = np.argsort(-cells, kind="stable")[: exact.most]
        told = [
            (exact.grid.value(int(place)), float(cells[place])) for place in first if cells[place] > above
        ]
        if not told:
            why = f"no value has more rows than the noise may give one, {above:.4g}: ask with more epsilon"
            return Answer(self.title, self.ask, why=why)
        intervals = [count_interval(rows, noise) for _, rows in told]
        rows = [[value, counted(count), *ends] for (value, count), ends in zip(told, intervals, strict=True)]
        notes = []
        if len(told) < exact.most:
            notes.append(f"no other value has more rows than the noise may give one, {above:.4g}")
        values = {"values": [list(each) for each in told], "intervals": intervals}
        header = [exact.column, "rows", "95 % from", "to"]
        return Answer(self.title, self.ask, header, rows, values, notes=notes)


def independence(cells: Doubles, noise: float) -> tuple[float, float] | None:
    """(chi-square, p) of noisy counts [rows, columns], or None where a cell is expected to hold too few, or
    would be in most tables of the kind.

    The draws follow from a fixed seed, so that the same release gives the same p.
    """
    found = _chi_square(cells)
    if found is None:
        return None
    statistic, expected = found
    rows = round(expected.sum())
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(rows, (expected / expected.sum()).ravel(), size=_DRAWS).astype(np.float64)
    drawn += generator.normal(0.0, noise, drawn.shape)
    tested = [each[0] for each in map(_chi_square, drawn.reshape(-1, *cells.shape)) if each is not None]
    if len(tested) < _DRAWS // 2:
        return None
    return statistic, (1 + sum(each >= statistic for each in tested)) / (1 + len(tested))


def _chi_square(cells: Doubles) -> tuple[float, Doubles] | None:
    down, across, whole = cells.sum(axis=1), cells.sum(axis=0), cells.sum()
    if not (whole > 0 and (down > 0).all() and (across > 0).all()):
        return None
    expected = np.outer(down, across) / whole
    if expected.min() < _FEWEST_EXPECTED:
        return None
    return float(((cells - expected) ** 2 / expected).sum()), expected


def highest_of(draws: int) -> float:
    """What all of so many standard normal draws are below with probability 0.95."""
    return float(stats.norm.ppf(0.95 ** (1.0 / draws)))
