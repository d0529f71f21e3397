"""Named sums over examples: what silos report, and how it adds up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roundtable.engine.messages import RoundRecord

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
    """The mean of every metric that has one."""
    return {name: value / count for name, (value, count) in sums.items() if count}


def figures(record: RoundRecord) -> dict[str, int | float]:
    """A committed round in numbers, named as in a history: train_NAME for training means, NAME for means of
    the model that it made, before_NAME for those of the model that it began with, and in buffered rounds the
    updates' mean staleness."""
    ages = record.staleness.values()
    return {
        "clients": len(record.contributors),
        "failed": len(record.failures),
        "excluded": len(record.excluded),
        "time": record.ended,
        **({"epsilon": record.charge["epsilon"]} if "epsilon" in record.charge else {}),
        **({"staleness": sum(ages) / len(ages)} if ages else {}),
        **{f"train_{name}": value for name, value in means(record.training).items()},
        **{f"before_{name}": value for name, value in means(record.before).items()},
        **means(record.evaluation),
    }
