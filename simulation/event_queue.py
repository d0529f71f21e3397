"""Virtual time: what happens next, and when."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from roundtable.engine import messages as m


@dataclass(frozen=True)
class AnswerDue:
    """At time `at` client number `index` has done `step`."""

    at: float
    index: int
    step: m.Step


@dataclass(frozen=True)
class Leaves:
    """Client number `index` goes away while it is at work on `step`."""

    index: int
    step: m.Step


@dataclass(frozen=True)
class PlacesOffered:
    """A client comes online for whom there may be work."""


Due = m.Event | AnswerDue | Leaves | PlacesOffered


class EventQueue:
    """Events by time, those of one time in the order in which they were added; and the engine's timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Due]] = []
        self._sequence = itertools.count()
        self._timers: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at: float, event: Due) -> None:
        """Adds an event."""
        heapq.heappush(self._heap, (at, next(self._sequence), event))

    def set_timer(self, timer: str, at: float) -> None:
        """Adds `DeadlinePassed(timer)`, in the place of an earlier one of the same name."""
        self._timers[timer] = at
        self.push(at, m.DeadlinePassed(timer))

    def pop(self) -> Due | None:
        """Moves `now` to the next event and returns it; None if it is a timer that was replaced."""
        self.now, _, event = heapq.heappop(self._heap)
        replaced = isinstance(event, m.DeadlinePassed) and self._timers.get(event.timer) != self.now
        return None if replaced else event

    def clear(self) -> None:
        """Removes everything."""
        self._heap.clear()
        self._timers.clear()
