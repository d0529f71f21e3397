"""What a simulation does differently where rounds overlap."""

from __future__ import annotations

from typing import Protocol

from roundtable.engine import messages as m
from roundtable.engine.state import EngineState
from roundtable.simulation.backend import World
from roundtable.simulation.client_updates import ClientUpdates
from roundtable.simulation.client_work import ClientWork
from roundtable.simulation.event_queue import EventQueue, PlacesOffered
from roundtable.simulation.world.fleet import Fleet


class Pacing(Protocol):
    """The driver's decisions that depend on `[round] mode`."""

    @property
    def least_together(self) -> int:
        """At least so many clients are trained at once, if so many are at work on the same step."""

    def training_begins(self, step: m.Step, cohort: int) -> None:
        """Clients are about to be asked for `step`, `cohort` of them so far."""

    def event_handled(self, state: EngineState) -> None:
        """The engine has dealt with an event."""

    def round_ended(self, work: ClientWork) -> None:
        """A round is committed."""


class SynchronousPacing:
    """One round after the other: nothing that was under way in a round matters after it."""

    least_together = 1

    def __init__(self, updates: ClientUpdates, queue: EventQueue) -> None:
        self._updates = updates
        self._queue = queue
        self._step = m.Step(0, 0, "")

    def training_begins(self, step: m.Step, cohort: int) -> None:
        """Makes room for the cohort's updates."""
        if step != self._step:
            self._step = step
            self._updates.begin(cohort)

    def event_handled(self, state: EngineState) -> None:
        """Nobody who comes online later is asked."""

    def round_ended(self, work: ClientWork) -> None:
        """Forgets what the round has left in the queue."""
        work.clear()
        self._queue.clear()


class BufferedPacing:
    """Clients of several rounds are at work at once, and go on beside the rounds."""

    least_together = 32
    """Backends are made for many clients at once."""

    def __init__(self, world: World, fleet: Fleet, updates: ClientUpdates, queue: EventQueue) -> None:
        self._fleet = fleet
        self._queue = queue
        self._concurrency = world.job.round.concurrency or len(world.names)
        self._next_offer = 0.0
        # Those at work, those in a buffer that is being used, and in the one that follows.
        most = min(self._concurrency, len(world.names))
        # Under masks anybody who is not at work may keep a finished update.
        others = len(world.names) if updates.unmasks else most
        updates.begin(most + others + (world.job.round.buffer or 1))

    def training_begins(self, step: m.Step, cohort: int) -> None:
        """There is room for all who can be at work."""

    def event_handled(self, state: EngineState) -> None:
        """Offers places that nobody could be found for again when the next client comes online."""
        if self._fleet.devices.always_there or self._next_offer > self._queue.now:
            return
        if sum(not assignment.away for assignment in state.at_work.values()) >= self._concurrency:
            return
        at = self._fleet.devices.next_arrival(self._queue.now)
        if at is not None:
            self._next_offer = at
            self._queue.push(at, PlacesOffered())

    def round_ended(self, work: ClientWork) -> None:
        """What is under way goes on."""
