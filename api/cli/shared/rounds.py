"""How a committed round reads in a terminal, a log and a table: the same words everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundtable.cli.shared.output import duration
from roundtable.core.observability.throughput import Throughput


def round_line(number: int, rounds: int, figures: Mapping[str, Any]) -> str:
    """One line, for example `round  3/20  accuracy 0.9123  loss 0.3011  3 of 3 silos  0.8 s`.

    `figures` has `training`, `evaluation` and `before` (name → mean), `contributors` and `cohort`, `seconds`
    where time is real, and `epsilon`, spent so far, under differential privacy. A secret cohort has no size
    here.
    """
    width = len(str(rounds))
    parts = [f"round {number:{width}d}/{rounds}"]
    parts += [f"{name} {value}" for name, value in metrics_of(figures).items()]
    if "epsilon" in figures:
        parts.append(f"epsilon {figures['epsilon']:.3f}")
    if "cohort" in figures:
        parts.append(f"{figures['contributors']} of {figures['cohort']} silos")
    if "seconds" in figures:
        parts.append(duration(figures["seconds"]))
    return "  ".join(parts)


def metrics_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """Name → formatted mean: what was evaluated, the loss last, then the loss of training, and what merging
    low-rank factors lost.

    What was measured of the model that the round began with is called so.
    """
    metrics: dict[str, str] = {}
    for key, where in (("evaluation", ""), ("before", " before the round"), ("central", " at the server")):
        means: Mapping[str, float] = figures.get(key) or {}
        names = [*sorted(set(means) - {"loss"}), *(["loss"] if "loss" in means else [])]
        metrics |= {f"{name}{where}": f"{means[name]:.4f}" for name in names}
    training: Mapping[str, float] = figures.get("training") or {}
    if "loss" in training:
        metrics["training loss"] = f"{training['loss']:.4f}"
    if "merge_error" in training:
        metrics["merge error"] = f"{training['merge_error']:.4f}"
    return metrics


def figures_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one entry of a job's history."""
    return {
        "training": _means(record["training"]),
        "evaluation": _means(record["evaluation"]),
        "before": _means(record["before"]),
        **_sizes(record),
        "seconds": record["ended"] - record["started"],
        **_epsilon(record["charge"]),
        **throughput_of(record),
    }


def throughput_of(record: Mapping[str, Any]) -> dict[str, int | float]:
    """What is known of the round's tokens, their bytes and speed, and the share of time in communication."""
    seconds, transfers = record["ended"] - record["started"], record.get("transfers", {})
    return Throughput.of(record["training"], transfers, record.get("contributors", ()), seconds).figures()


def _sizes(record: Mapping[str, Any]) -> dict[str, int]:
    """How many were asked and answered, unless the cohort is secret."""
    names = () if "cohort" in record.get("withheld", ()) else ("cohort", "contributors")
    return {name: len(record[name]) for name in names}


def _epsilon(charge: Mapping[str, Any]) -> dict[str, float]:
    return {"epsilon": charge["epsilon"]} if "epsilon" in charge else {}


def _means(sums: Mapping[str, Any]) -> dict[str, float]:
    from roundtable.core.observability.metric_sums import means

    return means({name: (total, count) for name, (total, count) in sums.items()})
