"""Reasons to end a job before its last round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from roundtable.core.job_tables.stop_table import StopTable, larger_is_better


@dataclass
class Trend:
    """One metric over the rounds that have it: the last value, the best, and how many came since that
    brought no improvement over it."""

    last: float | None = None
    best: float | None = None
    stale: int = 0

    def add(self, value: float, stop: StopTable) -> None:
        """The next value."""
        sign = _sign(stop)
        # What is not finite is no improvement, and nothing to improve on.
        if isfinite(value) and (self.best is None or sign * (value - self.best) > stop.minimum_improvement):
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        self.last = value


def stop_reason(stop: StopTable, trend: Trend, elapsed: float, where: str = "") -> str | None:
    """Why the job should end after a round, in words; None to go on.

    `trend` is of `stop.metric`; `where` says of which model, if it is not the round's own.
    """
    if stop.time is not None and elapsed >= stop.time:
        return f"the time of {stop.time:g} s has passed"
    if stop.metric is None or trend.last is None:
        return None
    if stop.target is not None and _sign(stop) * (trend.last - stop.target) >= 0:
        return f"{stop.metric}{where} reached {trend.last:.4g}; the target was {stop.target:g}"
    if stop.patience is not None and trend.stale >= stop.patience:
        return f"{stop.metric}{where} has not improved for {stop.patience} evaluations"
    return None


def missing_metric(stop: StopTable, trend: Trend, measured: Iterable[str]) -> str | None:
    """A warning, where the round has measured something and no round the metric that is to end the job."""
    names = sorted(measured)
    if stop.metric is None or trend.last is not None or not names:
        return None
    return (
        f"stop.metric = {stop.metric!r} is not among what the silos measure ({', '.join(names)}): it will "
        "not end this job"
    )


def _sign(stop: StopTable) -> float:
    return 1.0 if larger_is_better(stop.metric or "", stop) else -1.0
