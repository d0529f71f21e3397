"""An analysis of one's own: skewness and kurtosis of a column by group (docs/extending.md).

Round 1 counts rows, round 2 adds up values, round 3 powers of their distances from the mean, all of them in
units of half the column's range, so that each row adds 1 at most.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import roundtable as rt

POWERS = (2, 3, 4)


class Skewness(rt.OwnAnalysis):
    """Skewness and excess kurtosis of `column` in each group of `by`, as scipy.stats.skew and kurtosis."""

    def __init__(self, column: str, by: str) -> None:
        self.column = column
        self.by = by

    def form(self, columns: Mapping[str, Any]) -> rt.OwnForm:
        return rt.OwnForm(
            reads=(self.column, self.by),
            told=(self.by,),
            counts={"rows": (len(columns[self.by].values),)},
            sums={
                "values": rt.OwnSum(of="rows", round=2),
                "powers": rt.OwnSum(of="rows", round=3, shape=(len(POWERS),)),
            },
        )

    def count(self, table: Any) -> Mapping[str, Any]:
        return {"rows": [len(values) for values in self._groups(table)]}

    def add_up(self, table: Any, known: Mapping[str, np.ndarray], round: int) -> Mapping[str, Any]:
        groups = self._groups(table)
        if round == 2:
            return {"values": [values.sum() for values in groups]}
        means = np.nan_to_num(known["values"] / known["rows"])  # NaN: the group is hidden, and not asked for.
        away = [values - mean for values, mean in zip(groups, means, strict=True)]
        return {"powers": [[(each**power).sum() for power in POWERS] for each in away]}

    def answer(
        self, known: Mapping[str, np.ndarray], columns: Mapping[str, Any]
    ) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        second, third, fourth = (known["powers"] / known["rows"][:, None]).T
        with np.errstate(divide="ignore", invalid="ignore"):
            skewness, kurtosis = third / second**1.5, fourth / second**2 - 3.0
        lines = zip(columns[self.by].labels, known["rows"], skewness, kurtosis, strict=True)
        return (self.by, "rows", "skewness", "kurtosis"), [list(line) for line in lines]

    def _groups(self, table: Any) -> list[np.ndarray]:
        """The values of each group in units of half the range, from its middle."""
        described = table.descriptions[self.column]
        values = (table.column(self.column) - described.middle) / described.half
        whole = ~np.isnan(values)
        group, labels = table.column(self.by), table.descriptions[self.by].labels
        return [values[whole & (group == place)] for place in range(len(labels))]
