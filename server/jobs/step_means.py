"""A round's training steps in figures: means over what the silos' clusters said of them, for trackers."""

from __future__ import annotations

from collections.abc import Mapping

from roundtable.core.observability.monitoring import STEP_GAUGES
from roundtable.engine import messages as m
from roundtable.server.door.agent_messages import StepProgress

_MOST = "memory_bytes"


class StepMeans:
    """Of the attempt that is under way, by silo; a report is of a step now and then. Kept in memory only."""

    def __init__(self) -> None:
        self._at: tuple[int, int] = (0, 0)
        self._sums: dict[str, dict[str, tuple[float, int]]] = {}

    def add(self, client: str, step: m.Step, progress: StepProgress) -> None:
        """Takes a report; another attempt's begins anew."""
        if progress.figures is None or step.phase != m.TRAIN:
            return
        if (step.round, step.attempt) != self._at:
            self._at, self._sums = (step.round, step.attempt), {}
        sums = self._sums.setdefault(client, {})
        for name, value in {**progress.figures, "loss": progress.loss}.items():
            if name in STEP_GAUGES:
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (max(total, value), 1) if name == _MOST else (total + value, count + 1)

    def of(self, round: int, attempt: int) -> Mapping[str, Mapping[str, float]]:
        """By silo and figure; the most of its memory, the mean of the rest."""
        if (round, attempt) != self._at:
            return {}
        return {
            client: {name: total / count for name, (total, count) in sums.items()}
            for client, sums in self._sums.items()
        }
