"""Weighted least squares: linear regression of rows of unequal precision.

A row's weight is the inverse of its variance, up to a factor, as in statsmodels' WLS: errors do not change
when all weights are doubled. Weights are summed in units of the largest that the study states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.regression import Linear
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable


class WeightedLinear(Linear):
    """Weighted least squares with an intercept, over the rows with a weight above 0.

    Where the weights make few rows count for many (Kish's effective number, the square of their sum over the
    sum of their squares), there is no answer, as if there were no more rows than that.
    """

    most_rounds: ClassVar[int] = 4

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        weights: str,
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        found = self.number(weights)
        if (found.least or 0.0) < 0 or not found.most:
            raise ConfigError(f"{title}: weights are from 0 on: set least = 0 in [columns.{weights}]")
        self.weights = weights
        self._largest = float(found.most)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (*super().names, self.weights)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome, self.weights)

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {**super().reals, "weighed": (3,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {**super().public, "weighed": (3,)}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        weights = table.column(self.weights)
        kept = DataTable(
            {name: values[weights > 0] for name, values in table.columns.items()}, table.descriptions
        )
        if stage == 0:
            return super().sums(kept, public, stage)
        design, outcome = self._design(kept)
        by = self._weights_of(kept)
        both = np.column_stack([design, outcome])
        if stage == 1:
            first = ((both - self._middles) / self._halves * by[:, None]).sum(axis=0)
            weighed = np.array([by.sum(), (by**2).sum(), np.log(by).sum()])
            return {"first": first, "weighed": weighed}
        away = (both - public["mean"]) / self._halves
        if stage == 2:
            return {"first": by @ away, "second": (away * by[:, None]).T @ away}
        left = away[:, -1] - away[:, :-1] @ public["slopes"]
        return {"residual": np.array([by @ left, by @ left**2])}

    def _weights_of(self, table: DataTable) -> Doubles:
        """Of the rows of the design, in units of the largest."""
        whole = ~np.isnan(table.matrix((self.outcome, *self.on))).any(axis=1)
        found: Doubles = table.column(self.weights)[whole] / self._largest
        return found

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage in (0, 3):
            return super().step(public, sums, stage)
        if stage == 1:
            total, squares, _ = sums["weighed"]
            effective = min(total**2 / squares, float(public["rows"][0]))
            code = self._enough(effective, np.array([effective]))
            if code:
                return {"stage": -float(code)}
            mean = self._middles + self._halves * sums["first"] / total
            return {"stage": 2.0, "mean": mean, "weighed": sums["weighed"]}
        return self._solved(public, sums, float(public["weighed"][0]))

    @override
    def answer(self, public: Arrays) -> Answer:
        total, squares, logs = public["weighed"]
        figures = self._figures(public, float(total), float(logs))
        n, scale = figures.pop("n"), figures["scale"] * self._largest
        values = {"n": n, "n_effective": float(total**2 / squares), **figures, "scale": scale}
        notes = [
            f"{n} rows that count as {values['n_effective']:.4g} of equal weight, "
            f"R² {values['r_squared']:.4g}"
        ]
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)
