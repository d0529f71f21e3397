"""Quantiles, and the smallest and largest values that at least the least count of people share.

Every order statistic that is asked for has a bracket. A round counts its rows in `BINS` bins; the bin that
holds the order statistic, with as many of its neighbours as it takes to hold the least count of rows, is the
next bracket. It stops where the bracket is about as narrow as doubles are, or grows narrower no more: the
value is then known to lie inside, and the answer says how wide that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, TOO_FEW, Answer, Question
from roundtable.core.errors import AggregationError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

BINS = 256
_NARROW = 2.0**-46
_SHRINKS = 0.75


class Quantiles(Question):
    """Quantiles of a column at shares from 0 to 1, by linear interpolation or as the inverse of the
    distribution function.

    The shares 0 and 1, the extremes, are the k-th smallest and largest value, k being the least count: an
    extreme itself is one person's.
    """

    ask: ClassVar[str] = "quantiles"
    most_rounds: ClassVar[int] = 8

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        column: str,
        at: tuple[float, ...],
        method: str = "linear",
    ) -> None:
        super().__init__(columns, least, title)
        self.column = column
        self.at = at
        self.method = method
        span = self.number(column)
        self._low = float(span.least or 0.0)
        self._high = float(span.most or 0.0)

    @property
    def _probes(self) -> int:
        return 2 * len(self.at)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (1,), "bins": (self._probes, BINS)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        each = (self._probes,)
        return {"rows": (1,), "low": each, "high": each, "below": each, "inside": each, "open": each}

    def ranks(self, rows: float) -> list[tuple[int, int, float]]:
        """Of each share the two order statistics, from 0, between which it is, and the share of the
        second."""
        found = []
        edge = min(self.least, math.ceil(rows / 2)) - 1
        for share in self.at:
            position = share * (rows - 1)
            if self.method == "inverted_cdf":
                first = second = max(0, math.ceil(share * rows) - 1)
                weight = 0.0
            else:
                first = math.floor(position)
                weight = position - first
                second = min(first + 1, int(rows) - 1)
            bound = int(rows) - 1 - edge
            kept = (min(max(first, edge), bound), min(max(second, edge), bound))
            found.append((*kept, weight))
        return found

    def _edges(self, low: float, high: float) -> Doubles:
        edges = low + (high - low) * np.arange(BINS + 1) / BINS
        edges[-1] = high
        return edges

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        values = table.column(self.column)
        values = values[~np.isnan(values)]
        if stage == 0:
            return {"rows": np.array([float(len(values))])}
        bins = np.zeros((self._probes, BINS))
        known: dict[tuple[float, float], Doubles] = {}
        for probe in np.flatnonzero(public["open"]):
            bracket = float(public["low"][probe]), float(public["high"][probe])
            if bracket not in known:
                edges = self._edges(*bracket)
                within = values[(values >= edges[0]) & (values < edges[-1])]
                place = np.searchsorted(edges, within, side="right") - 1
                known[bracket] = np.bincount(place, minlength=BINS).astype(np.float64)
            bins[probe] = known[bracket]
        return {"bins": bins}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            rows = float(sums["rows"][0])
            if rows < max(self.least, 1):
                return {"stage": -float(TOO_FEW), "rows": self.hide(sums["rows"])}
            each = np.ones(self._probes)
            return {
                "stage": 1.0,
                "rows": sums["rows"],
                "low": self._low * each,
                "high": np.nextafter(self._high, np.inf) * each,
                "below": 0 * each,
                "inside": rows * each,
                "open": each,
            }
        low, high, below, inside, still = (
            public[name].copy() for name in ("low", "high", "below", "inside", "open")
        )
        wanted = [rank for pair in self.ranks(float(public["rows"][0])) for rank in pair[:2]]
        narrow = _NARROW * (self._high - self._low)
        for probe in np.flatnonzero(still):
            edges, counted = self._edges(low[probe], high[probe]), sums["bins"][probe]
            if counted.sum() != inside[probe]:
                raise AggregationError(
                    f"{self.title}: {int(counted.sum())} rows are in bins that held {int(inside[probe])} in "
                    "the round before: a silo sent something else than its counts"
                )
            before = below[probe] + np.concatenate([[0.0], np.cumsum(counted)])
            place = int(np.searchsorted(before, wanted[probe], side="right")) - 1
            first, last = held_by(before, min(max(place, 0), BINS - 1), max(self.least, 1))
            width = edges[last] - edges[first]
            still[probe] = float(narrow < width <= _SHRINKS * (high[probe] - low[probe]))
            below[probe], inside[probe] = before[first], before[last] - before[first]
            low[probe], high[probe] = edges[first], edges[last]
        return {
            "stage": float(stage + 1) if still.any() else DONE,
            "low": low,
            "high": high,
            "below": below,
            "inside": inside,
            "open": still,
        }

    @override
    def answer(self, public: Arrays) -> Answer:
        rows: list[list[Any]] = []
        values = []
        narrow = _NARROW * (self._high - self._low)
        shown, off = [], []
        for probe, rank in enumerate(
            rank for pair in self.ranks(float(public["rows"][0])) for rank in pair[:2]
        ):
            low, high = float(public["low"][probe]), min(float(public["high"][probe]), self._high)
            share = (rank - float(public["below"][probe]) + 0.5) / float(public["inside"][probe])
            exact = high - low <= narrow
            shown.append(shortest(low, high) if exact else low + share * (high - low))
            off.append(0.0 if exact else max(share, 1 - share) * (high - low))
        for place, (share, (_, _, weight)) in enumerate(
            zip(self.at, self.ranks(float(public["rows"][0])), strict=True)
        ):
            one, two = 2 * place, 2 * place + 1
            value = shown[one] + weight * (shown[two] - shown[one])
            error = (1 - weight) * off[one] + weight * off[two]
            values.append({"at": share, "value": value, "within": error})
            rows.append([share, value, error])
        header = ["share", self.column, "within ±"]
        found = {"rows": int(public["rows"][0]), "quantiles": values}
        return Answer(self.title, self.ask, header, rows, found, notes=self._notes())

    def _notes(self) -> list[str]:
        notes = []
        if self.least > 1 and {0.0, 1.0} & set(self.at):
            notes.append(
                f"share 0 and 1: the {self.least}-th smallest and largest value, of one person neither"
            )
        return notes


def held_by(before: Doubles, place: int, least: int) -> tuple[int, int]:
    """The bins from first to last (not included) around `place` that hold at least so many rows: all of them
    where they hold fewer. `before` [bins + 1] counts the rows below each edge."""
    first, last = place, place + 1
    while before[last] - before[first] < least and (first > 0 or last < len(before) - 1):
        left = before[first] - before[first - 1] if first > 0 else -1.0
        right = before[last + 1] - before[last] if last < len(before) - 1 else -1.0
        if left >= right:
            first -= 1
        else:
            last += 1
    return first, last


def shortest(low: float, high: float) -> float:
    """The number with the fewest digits from `low` on and below `high`."""
    middle = low + (high - low) / 2
    for digits in range(18):
        found = round(middle, digits)
        if low <= found < high:
            return found
    return middle
