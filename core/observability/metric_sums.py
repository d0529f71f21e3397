"""Named sums over examples: what silos report, how it adds up, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roundtable.core.job_tables.metrics_table import expressions_of
from roundtable.core.measures.expressions import Undefined
from roundtable.core.measures.families import families_in, is_cell
from roundtable.core.observability.throughput import TOKENS

Sums = Mapping[str, tuple[float, int]]


def add_up(parts: Iterable[Sums]) -> dict[str, tuple[float, int]]:
    """Sums and counts over silos; a metric that only some silos report is summed over those."""
    total: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            before = total.get(name, (0.0, 0))
            total[name] = (before[0] + value, before[1] + count)
    return total


def mean(sums: Sums, name: str) -> float | None:
    """The mean of a metric; None where nobody reported it or nobody had an example."""
    value, count = sums.get(name, (0.0, 0))
    return value / count if count else None


def means(sums: Sums) -> dict[str, float]:
    """The mean of every metric that has one and is not a part of another's state; tokens are a sum."""
    return {
        name: value / count
        for name, (value, count) in sums.items()
        if count and not is_cell(name) and name != TOKENS
    }


def worked_out(sums: Sums, metrics: Mapping[str, str]) -> tuple[dict[str, tuple[float, int]], dict[str, str]]:
    """(`sums` and the figures that follow from them, each as (value, 1); why others are not defined).

    Figures are those of metrics with state and, of the same sums, those of the job's `[metrics]`, which win.
    """
    if not sums:
        return {}, {}
    found, undefined = dict(sums), dict[str, str]()
    for family in families_in(sums):
        for name, value in family.figures(sums).items():
            if value is None:
                undefined[name] = "its examples do not define it"
            else:
                found[name] = (value, 1)
    for name, expression in expressions_of(metrics).items():
        try:
            found[name] = (expression(sums), 1)
        except Undefined as error:
            found.pop(name, None)
            undefined[name] = str(error)
    return found, undefined
