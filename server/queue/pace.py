"""How long a job's rounds take, measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

_ROUNDS = 5


class Pace:
    """The durations of the last few rounds, in seconds, in the order in which they ended."""

    def __init__(self, durations: Iterable[float]) -> None:
        self._last = deque(durations, maxlen=_ROUNDS)

    def add(self, seconds: float) -> None:
        """A round has ended, which took so long."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        """Their median; None before the first has ended."""
        return median(self._last) if self._last else None
