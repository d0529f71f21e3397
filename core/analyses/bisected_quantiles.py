"""Quantiles by bisection: each round counts the rows in both halves of a bracket, which then is the half that
holds the order statistic.

Of a probe two counts travel in a round, where a histogram's are `BINS`, and it takes more rounds: one for
each halving. A bracket is halved while it is wider than asked for, and while each half that holds a probe has
the least count of rows; where one has not, it is halved for none. Counts stay with the coordinator: silos and
readers get brackets alone, so that no difference of two counts tells of few rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.order_statistics import Quantiles
from roundtable.core.analyses.question import DONE, Answer
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

MOST_HALVINGS = 60


class BisectedQuantiles(Quantiles):
    """The same quantiles, each known to lie in a bracket as wide as `within`, or as the least count of rows
    takes: the value that is told is its middle."""

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        column: str,
        at: tuple[float, ...],
        method: str,
        within: float,
    ) -> None:
        super().__init__(columns, least, title, column, at, method)
        self.within = within
        self._halvings = max(0, math.ceil(math.log2((self._high - self._low) / within)))
        if self._halvings > MOST_HALVINGS:
            raise ConfigError(
                f"{title}: within = {within:g} of a column from {self._low:g} to {self._high:g} takes "
                f"{self._halvings} halvings, a round each, and {MOST_HALVINGS} are allowed"
            )

    @property
    @override
    def rounds(self) -> int:
        return 1 + self._halvings

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (1,), "halves": (self._probes, 2)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        each = (self._probes,)
        return {"rows": (1,), "low": each, "high": each, "open": each}

    @property
    @override
    def kept(self) -> Mapping[str, Shape]:
        return {"below": (self._probes,), "inside": (self._probes,)}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        if stage == 0:
            return super().sums(table, public, 0)
        kept = "sorted values", self.column
        if kept not in table.derived:
            values = table.column(self.column)
            table.derived[kept] = np.sort(values[~np.isnan(values)])
        values = table.derived[kept]
        low, high = public["low"], public["high"]
        edges = np.stack([low, low + (high - low) / 2, high])
        below = np.searchsorted(values, edges, side="left")
        return {"halves": (np.diff(below, axis=0) * public["open"]).T.astype(np.float64)}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            found = super().step(public, sums, 0)
            wide = self._halvings > 0
            return found if found["stage"] < 0 else {**found, "stage": 1.0 if wide else DONE, "open": wide}
        low, high, below, inside, still = (
            public[name].copy() for name in ("low", "high", "below", "inside", "open")
        )
        ranks = np.array([rank for pair in self.ranks(float(public["rows"][0])) for rank in pair[:2]])
        halves = sums["halves"]
        if (halves.sum(axis=1) != inside)[still > 0].any():
            raise AggregationError(
                f"{self.title}: other rows are in the halves of a bracket than in the bracket: a silo sent "
                "something else than its counts"
            )
        upper = ranks >= below + halves[:, 0]
        held = np.where(upper, halves[:, 1], halves[:, 0])
        # Two probes in one bracket, one of which is halved, would tell where the other one is.
        few = {start for start, rows, on in zip(low, held, still, strict=True) if on and rows < self.least}
        still = still * np.array([start not in few for start in low])
        middle, on = low + (high - low) / 2, still > 0
        below = np.where(on & upper, below + halves[:, 0], below)
        low, high = np.where(on & upper, middle, low), np.where(on & ~upper, middle, high)
        last = stage == self._halvings
        return {
            "stage": DONE if last or not on.any() else float(stage + 1),
            "low": low,
            "high": high,
            "below": below,
            "inside": np.where(on, held, inside),
            "open": still,
        }

    @override
    def answer(self, public: Arrays) -> Answer:
        low, high = public["low"], np.minimum(public["high"], self._high)
        middles, offs = low + (high - low) / 2, (high - low) / 2
        values = []
        for place, (share, (_, _, weight)) in enumerate(
            zip(self.at, self.ranks(float(public["rows"][0])), strict=True)
        ):
            pair, parts = slice(2 * place, 2 * place + 2), np.array([1 - weight, weight])
            value, off = float(parts @ middles[pair]), float(parts @ offs[pair])
            values.append({"at": share, "value": value, "within": off})
        rows = [[each["at"], each["value"], each["within"]] for each in values]
        notes = self._notes()
        if max(each["within"] for each in values) > self.within / 2 * (1 + 1e-9):
            notes.append(f"wider than asked for where a half would hold fewer than {self.least} rows")
        found = {"rows": int(public["rows"][0]), "quantiles": values}
        return Answer(self.title, self.ask, ["share", self.column, "within ±"], rows, found, notes=notes)
