"""Reasons to end a job before its last round."""

from __future__ import annotations

from collections.abc import Sequence

from roundtable.core.config import StopTable
from roundtable.engine.messages import RoundRecord
from roundtable.engine.metrics import mean


def stop_reason(stop: StopTable, history: Sequence[RoundRecord], elapsed: float) -> str | None:
    """Why the job should end after the last round of `history`, in words; None to go on."""
    if stop.time is not None and elapsed >= stop.time:
        return f"the time of {stop.time:g} s has passed"
    if stop.metric is None:
        return None
    values = _values(stop.metric, history)
    if not values:
        return None
    sign = 1.0 if _larger_is_better(stop) else -1.0
    if stop.target is not None and sign * (values[-1] - stop.target) >= 0:
        return f"{stop.metric} reached {values[-1]:.4g}; the target was {stop.target:g}"
    if stop.patience is not None and _stale(values, sign, stop.minimum_improvement) >= stop.patience:
        return f"{stop.metric} has not improved for {stop.patience} evaluations"
    return None


def _values(metric: str, history: Sequence[RoundRecord]) -> list[float]:
    """The metric over the evaluated rounds; over training where no round has it from an evaluation."""
    evaluated = [value for record in history if (value := mean(record.evaluation, metric)) is not None]
    if evaluated:
        return evaluated
    return [value for record in history if (value := mean(record.training, metric)) is not None]


def _larger_is_better(stop: StopTable) -> bool:
    if stop.larger_is_better is not None:
        return stop.larger_is_better
    return not any(word in (stop.metric or "") for word in ("loss", "error"))


def _stale(values: Sequence[float], sign: float, margin: float) -> int:
    """How many of the last values brought no improvement over the best before them."""
    best, since = None, 0
    for value in values:
        if best is None or sign * (value - best) > margin:
            best, since = value, 0
        else:
            since += 1
    return since
