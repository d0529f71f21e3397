"""What follows from how often each value of a stated domain occurs: rank tests, and the most frequent values.

The domain is a grid from a column's least value in steps of `every`; a value counts as the nearest of the
grid, so that answers are exact for values that lie on it, such as whole numbers with every = 1. Counts of
single values stay with the coordinator's process: what is published are the test's figures, or the values
that enough rows share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.order_statistics import shortest
from roundtable.core.analyses.question import DONE, TOO_FEW, Answer, Question, cells
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

MOST_CELLS = 100_000


class ValueGrid:
    """The values of a domain: those of a category, or a grid over a column's range."""

    def __init__(self, question: Question, name: str, every: float | None) -> None:
        self.name = name
        self.every = every
        found = question.described(name)
        if found.kind == "category":
            if every is not None:
                raise ConfigError(f"{question.title}: every is of numbers, and {name!r} is a category")
            self.labels = question.category(name).labels
            self.least = 0.0
            self.size = len(self.labels)
            return
        span = question.number(name)
        if every is None:
            raise ConfigError(
                f"{question.title}: column {name!r} is a number: say the width of the grid of its values, "
                "such as every = 1 for whole numbers"
            )
        self.labels = []
        self.least = float(span.least or 0.0)
        self.size = int(np.floor((float(span.most or 0.0) - self.least) / every + 0.5)) + 1
        if self.size > MOST_CELLS:
            raise ConfigError(
                f"{question.title}: {name!r} has {self.size:,} values from least to most in steps of "
                f"{every:g}, and {MOST_CELLS:,} are allowed: take a wider every"
            )

    def places(self, table: DataTable) -> Doubles:
        """The place of each row's value, NaN where it is missing."""
        values = table.column(self.name)
        if self.every is None:
            return values
        return np.clip(np.floor((values - self.least) / self.every + 0.5), 0, self.size - 1)

    def value(self, place: int) -> float | str:
        """What stands at a place."""
        if self.every is None:
            return self.labels[place]
        exact = self.least + place * self.every
        return shortest(exact - 1e-9 * self.every, exact + 1e-9 * self.every)


class MannWhitney(Question):
    """The Mann-Whitney test of a column between two groups (normal approximation with the correction for
    ties), and the Kruskal-Wallis test of the same.

    U counts the pairs in which the value of the first group is the larger one, equal ones half.
    """

    ask: ClassVar[str] = "mann_whitney"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        column: str,
        by: str,
        every: float | None,
        continuity: bool = True,
    ) -> None:
        super().__init__(columns, least, title)
        self.column = column
        self.by = by
        self.continuity = continuity
        self.grid = ValueGrid(self, column, every)
        self.labels = self.category(by).labels
        if len(self.labels) != 2:
            raise ConfigError(
                f"{title}: mann_whitney compares two groups, and {by!r} has {len(self.labels)} values"
            )

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.column, self.by)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"cells": (2, self.grid.size)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"rows": (2,), "pairs": (1,), "ties": (1,)}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        places = [table.column(self.by), self.grid.places(table)]
        return {"cells": cells(places, (2, self.grid.size))}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        one, two = sums["cells"]
        rows = np.array([one.sum(), two.sum()])
        if (rows < max(self.least, 1)).any():
            return {"stage": -float(TOO_FEW), "rows": self.hide(rows)}
        below = np.cumsum(two) - two
        tied = one + two
        return {
            "stage": DONE,
            "rows": rows,
            "pairs": np.array([(one * (below + two / 2)).sum()]),
            "ties": np.array([(tied**3 - tied).sum()]),
        }

    @override
    def answer(self, public: Arrays) -> Answer:
        one, two = (float(value) for value in public["rows"])
        n, u = one + two, float(public["pairs"][0])
        spread = one * two / 12 * (n + 1 - float(public["ties"][0]) / (n * (n - 1)))
        if not spread > 0:
            return Answer(self.title, self.ask, why="all values are the same: no test ranks them")
        away = abs(u - one * two / 2)
        z = max(away - (0.5 if self.continuity else 0.0), 0.0) / float(np.sqrt(spread))
        h = away**2 / spread
        p = float(2 * stats.norm.sf(z))
        first, second = self.labels
        values = {
            "U": {first: u, second: one * two - u},
            "p": p,
            "groups": {first: int(one), second: int(two)},
            "larger": u / (one * two),
            "kruskal_wallis": {"H": h, "p": float(stats.chi2.sf(h, 1))},
        }
        header = ["group", "rows", "U", "larger", "p"]
        rows = [
            [first, int(one), u, u / (one * two), p],
            [second, int(two), one * two - u, 1 - u / (one * two), p],
        ]
        note = f"larger: the share of pairs in which the group's value of {self.column} is the larger one"
        return Answer(self.title, self.ask, header, rows, values, notes=[note])


class TopValues(Question):
    """The most frequent values of a column, as far as at least the least count of rows have them; of values
    that are equally frequent the first of the domain."""

    ask: ClassVar[str] = "top_values"
    tells_counts_alone: ClassVar[bool] = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        column: str,
        most: int,
        every: float | None,
    ) -> None:
        super().__init__(columns, least, title)
        self.column = column
        self.most = most
        self.grid = ValueGrid(self, column, every)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    def _fewest(self) -> int:
        """Rows of a value that is told: as many as the least count, and as do not round to none."""
        return max(self.least, 1, -(-self.round_to // 2))

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"cells": (self.grid.size,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"places": (self.most,), "rows": (self.most,)}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        return {"cells": cells([self.grid.places(table)], (self.grid.size,))}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        # In the order of what is told: that of what is not would tell of it.
        enough = sums["cells"] >= self._fewest
        counted = np.where(enough, self.rounded(sums["cells"]), 0.0)
        first = np.argsort(-counted, kind="stable")[: self.most]
        first = first[counted[first] > 0]
        places, rows = np.zeros(self.most), np.zeros(self.most)
        places[: len(first)], rows[: len(first)] = first, counted[first]
        return {"stage": DONE if len(first) else -float(TOO_FEW), "places": places, "rows": rows}

    @override
    def answer(self, public: Arrays) -> Answer:
        told = [
            [self.grid.value(int(place)), int(rows)]
            for place, rows in zip(public["places"], public["rows"], strict=True)
            if rows
        ]
        notes = []
        if len(told) < self.most:
            notes.append(f"no other value is that of {self._fewest} rows")
        return Answer(self.title, self.ask, [self.column, "rows"], told, {"values": told}, notes=notes)
