"""Counters and histograms of a process, cheap enough to be kept whether anybody reads them or not."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter

BOUNDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
LAG_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LAG_SECONDS = 0.5


class Histogram:
    """Counts how many values lie at or below each bound, and adds them up."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """Counts one value, in seconds."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it) for each bound; the last is "+Inf"."""
        cumulative, count = [], 0
        for name, more in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            count += more
            cumulative.append((name, float(count)))
        return cumulative


class ProcessMetrics:
    """Counters by name and labels, histograms by name and one label, and the lag of the event loop."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.spreads: dict[tuple[str, str], Histogram] = {}
        self.lag = Histogram(LAG_BOUNDS)

    def count(self, name: str, *labels: str) -> None:
        """Adds 1 to the counter of this name and these labels."""
        self.counts[name, *labels] += 1

    def add(self, name: str, amount: int, *labels: str) -> None:
        """Adds an amount to the counter of this name and these labels."""
        self.counts[name, *labels] += amount

    def took(self, name: str, label: str, seconds: float) -> None:
        """Adds a duration in seconds to the histogram of this name and label; below 0 counts as 0."""
        self.spreads.setdefault((name, label), Histogram()).add(max(0.0, seconds))

    def of(self, name: str) -> dict[tuple[str, ...], int]:
        """The counts under a name, by their labels."""
        return {key[1:]: count for key, count in self.counts.items() if key[0] == name}

    def spreads_of(self, name: str) -> dict[str, Histogram]:
        """The spreads under a name, by their label."""
        return {label: spread for (kept, label), spread in self.spreads.items() if kept == name}

    async def measure_lag(self) -> None:
        """Measures how late the event loop wakes its tasks, every half second, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.lag.add(max(0.0, loop.time() - due))
