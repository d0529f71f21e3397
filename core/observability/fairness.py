"""How evenly a model serves silos, each weighing alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roundtable.core.job_tables.stop_table import StopTable, larger_is_better


@dataclass(frozen=True)
class Fairness:
    """A metric over clients, each weighing alike: its mean, its standard deviation, and the mean of the worst
    tenth (at least one client), and which end was taken for the worst."""

    clients: int
    mean: float
    spread: float
    worst_tenth: float
    larger_is_better: bool


def fairness_of(rows: Mapping[str, Mapping[str, float]], stop: StopTable) -> dict[str, Fairness]:
    """Of each metric that at least two of the clients have; `stop` states the direction of its own metric."""
    found = {}
    for metric in dict.fromkeys(name for row in rows.values() for name in row):
        values = sorted(row[metric] for row in rows.values() if metric in row)
        if len(values) < 2:
            continue
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        tenth = max(1, len(values) // 10)
        larger = larger_is_better(metric, stop)
        worst = values[:tenth] if larger else values[-tenth:]
        found[metric] = Fairness(len(values), mean, spread, math.fsum(worst) / tenth, larger)
    return found
