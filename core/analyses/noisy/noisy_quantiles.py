"""Quantiles from a noisy histogram: shares of rows below the edges of 64 bins over the column's range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.noisy.noisy_cells import NoisyHistogram
from roundtable.core.analyses.noisy.noisy_question import Q95, NoisyQuestion, SumBlock
from roundtable.core.analyses.question import Answer
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

BINS = 64
"""More would be narrower than the noise, which grows with the root of their number, tells apart."""


class NoisyQuantiles(NoisyQuestion):
    """Quantiles with 95 % intervals: the edges between which the share of rows below may be what is asked."""

    ask: ClassVar[str] = "quantiles"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, column: str, at: tuple[float, ...]
    ) -> None:
        super().__init__(columns, title)
        if {0.0, 1.0} & set(at):
            raise ConfigError(
                f"{title}: under [privacy] the shares 0 and 1 are not told: an extreme is one person's; "
                "ask for 0.05 and 0.95"
            )
        self.column = column
        self.at = at
        self._histogram = NoisyHistogram(columns, title, column, BINS, None)
        self._span = self.number(column)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    @override
    def blocks(self) -> Mapping[str, SumBlock]:
        return {"bins": SumBlock((BINS,), 1.0)}

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        return {"bins": self._histogram.added(table)["cells"][0]}

    @override
    def answer(self, public: Arrays) -> Answer:
        noise = self.spread("bins", self.silos(public))
        bins = public["bins"]
        edges = self._span.middle + self._span.half * np.linspace(-1.0, 1.0, BINS + 1)
        n = float(bins.sum())
        found, spans = [], []
        for share in self.at:
            value, low, high = _quantile(bins, edges, share, noise)
            found.append({"at": share, "value": value, "interval": [low, high]})
            spans.append([low, high])
        if n < Q95 * noise * BINS**0.5:
            return Answer(self.title, self.ask, why="so few rows that the noise hides how many")
        rows = [[each["at"], each["value"], *ends] for each, ends in zip(found, spans, strict=True)]
        width = float(edges[1] - edges[0])
        notes = [f"of {BINS} bins {width:.4g} wide; intervals count the noise in"]
        header = ["share", self.column, "95 % from", "to"]
        return Answer(
            self.title, self.ask, header, rows, {"rows": n, "quantiles": found, "bin": width}, notes=notes
        )


def _quantile(bins: Doubles, edges: Doubles, share: float, noise: float) -> tuple[float, float, float]:
    """(estimate, low, high). Below an edge lie (1 − share) of the rows beneath it less share of those above:
    0 at the quantile, with the noise of all bins and the variance of a share of so many rows."""
    n = max(float(bins.sum()), 1.0)
    below = np.concatenate([[0.0], np.cumsum(bins)])
    away = below - share * bins.sum()
    places = np.arange(len(bins) + 1)
    noises = noise**2 * ((1 - share) ** 2 * places + share**2 * (len(bins) - places))
    error = np.sqrt(noises + n * share * (1 - share))
    # The curve that does not fall and is nearest in least squares (Barlow et al. 1972).
    curve = rising(away)
    place = int(np.clip(np.searchsorted(curve, 0.0, side="right") - 1, 0, len(bins) - 1))
    step = curve[place + 1] - curve[place]
    inside = 0.5 if step <= 0 else min(max(-curve[place] / step, 0.0), 1.0)
    value = float(edges[place] + inside * (edges[place + 1] - edges[place]))
    may_be = [place, place + 1, *np.flatnonzero(np.abs(away) <= Q95 * error).tolist()]
    # Within a bin nobody knows where its rows lie.
    first, last = max(min(may_be) - 1, 0), min(max(may_be) + 1, len(bins))
    if first < place and away[first + 1] < -Q95 * error[first + 1]:
        first += 1
    if last > place + 1 and away[last - 1] > Q95 * error[last - 1]:
        last -= 1
    return value, float(edges[first]), float(edges[last])


def rising(values: Doubles) -> Doubles:
    """The non-decreasing sequence nearest to `values` in least squares."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, size = (before * many + mean * size) / (many + size), many + size
        pools.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in pools])
