"""Metrics as named (sum, count): sums of batches, and of silos, add up."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from roundtable.core.errors import TaskError
from roundtable.core.measures.columns import why_not_a_metric
from roundtable.core.measures.families import is_cell
from roundtable.core.observability.throughput import TOKENS

log = logging.getLogger("roundtable.metrics")

Metrics = dict[str, tuple[float, int]]
_warned: set[tuple[str, str]] = set()


def add(sums: Metrics, more: Mapping[str, tuple[float, int]]) -> None:
    """Adds `more` into `sums`."""
    for name, (value, count) in more.items():
        old = sums.get(name, (0.0, 0))
        sums[name] = (old[0] + value, old[1] + count)


def as_sums(metrics: Any, task: object) -> Metrics:
    """What a task or script reported, as plain numbers; TaskError for any other form."""
    wanted = (
        f"the metrics of {type(task).__name__} must be {{name: (sum, count)}}, for example "
        "{'accuracy': (correct, total)}"
    )
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{wanted}, and they are {_form(metrics)}")
    found = {}
    for name, pair in metrics.items():
        try:
            total, count = pair
            found[str(name)] = float(total), int(count)
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(f"{wanted}, and {str(name)!r} is {_form(pair)}") from None
    return found


def _form(value: Any) -> str:
    """What a value is, without what is in it, which may be data."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(_form, value[:4]))}"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {[*shape]}")


def training_sums(task: object, loss: float, seen: int) -> Metrics:
    """What a round's training tells: the `loss` summed over the examples that were `seen`, and their tokens
    where the task says how many each has."""
    tokens: int | None = getattr(task, "example_tokens", None)
    return {"loss": (loss, seen)} | ({} if tokens is None else {TOKENS: (float(tokens * seen), seen)})


def checked(metrics: Any, task: object, reserved: str | None = None) -> Metrics:
    """What a task measured of a model, as plain numbers; TaskError for any other form, and for the name
    `reserved` or that of a column that tables of results have anyway."""
    numbers = as_sums(metrics, task)
    if reserved in numbers:
        raise TaskError(f"{type(task).__name__}.metrics() may not use the name {reserved!r}: it is the loss")
    for name in numbers:
        if why := why_not_a_metric(name):
            raise TaskError(f"the metrics of {type(task).__name__}: {why}")
    return numbers


class Counts:
    """Notices means in the place of sums: a metric that counts 1 for each of several larger batches."""

    def __init__(self, task: object) -> None:
        self._task = type(task).__name__
        self._batches = 0
        self._ones: set[str] | None = None

    def add(self, metrics: Metrics, size: int) -> None:
        """The metrics of a batch of `size` examples."""
        if size > 1:
            ones = {name for name, (_, count) in metrics.items() if count == 1 and not is_cell(name)}
            self._ones = ones if self._ones is None else self._ones & ones
            self._batches += 1

    def warn(self) -> None:
        """Says it in the log, once for each task and metric of this process."""
        for name in sorted(self._ones or ()):
            if (self._task, name) not in _warned:
                _warned.add((self._task, name))
                log.warning(
                    "%s.metrics(): %r counts 1 for each batch, whatever its size, as a mean would: every "
                    "batch and every silo then weighs alike. Return (sum over the batch, number of examples)",
                    self._task,
                    name,
                )


def summable(metrics: Metrics, bounds: Mapping[str, float]) -> Metrics:
    """Those of a model's metrics that a secure sum holds (`evaluation.bounds`).

    TaskError for a name that the task does not measure; without test data nothing is measured. What is not
    finite, or over no example, is left out: it would make the whole sum worthless.
    """
    if metrics and (unknown := sorted(bounds.keys() - metrics.keys())):
        raise TaskError(
            f"evaluation.bounds names {', '.join(unknown)}, and the task measures "
            f"{', '.join(sorted(metrics))}: sum what it measures, or add the metric to its metrics()"
        )
    return {
        name: (metrics[name][0], metrics[name][1])
        for name in sorted(bounds.keys() & metrics.keys())
        if metrics[name][1] > 0 and math.isfinite(metrics[name][0])
    }


def left_out_or_cut(metrics: Metrics, bounds: Mapping[str, float]) -> dict[str, str]:
    """What a secure sum does not hold as it was measured, by the metric's name, in words."""
    summed, told = summable(metrics, bounds), {}
    for name in sorted(bounds):
        if name not in summed:
            why = "is over no example, or not finite" if metrics else "is missing, for want of test data"
            told[name] = f"{name} {why}: left out of the sum"
            continue
        total, count = summed[name]
        if abs(total / count) > bounds[name]:
            told[name] = (
                f"{name} is {total / count:.4g}, and counts for no more than evaluation.bounds says: "
                f"{bounds[name]:g}"
            )
    return told


def loss_of(metrics: Mapping[str, tuple[float, int]]) -> str:
    """The mean loss behind a comma, for log lines; empty if there is none."""
    total, count = metrics.get("loss", (math.nan, 0))
    return f", loss {total / count:.4g}" if count else ""
