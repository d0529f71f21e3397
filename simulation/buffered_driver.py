"""Buffered rounds in virtual time: clients of several rounds are at work at once.

What a client trains from is the model that it was given, so older models are kept while somebody is at
work on one. Everything else that has to survive an interruption is worked out again: who answers when
follows from when it was asked, and an update from its model.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from roundtable.engine import messages as m
from roundtable.engine.policies.buffered import WORK
from roundtable.engine.state import Assignment
from roundtable.engine.validation.round_plan import Plan
from roundtable.simulation.backend import Backend, World
from roundtable.simulation.driver import Arrived, Checkpoint, Driver, Gone, Listener
from roundtable.simulation.world.fleet import Fleet

_WAKE = "wake"
_TOGETHER = 32
"""At least so many clients are trained at once, if so many are at work: backends are made for that."""


def driver_of(world: World, plan: Plan, backend: Backend, fleet: Fleet, listener: Listener) -> Driver:
    """The driver of the job's `[round] mode`."""
    kind = BufferedDriver if world.job.round.mode == "buffered" else Driver
    return kind(world, plan, backend, fleet, listener)


class BufferedDriver(Driver):
    """One run of a job with buffered rounds. `_earlier` are vectors by the round that made them."""

    def __init__(self, world: World, plan: Plan, backend: Backend, fleet: Fleet, listener: Listener) -> None:
        super().__init__(world, plan, backend, fleet, listener)
        self._batch = world.job.round.buffer or 1
        self._earlier: dict[int, Tensor] = {}
        self._taken: list[int] = []
        most = world.job.round.concurrency or len(world.names)
        # Those at work, those in a buffer that is being used, and in the one that follows.
        self._capacity = 2 * min(most, len(world.names)) + self._batch
        self._workshop.begin(self._capacity)

    @property
    def _at_work(self) -> Mapping[str, Assignment]:
        return self._engine.state.at_work

    @override
    def resume(self, checkpoint: Checkpoint, history: Sequence[m.RoundRecord]) -> None:
        """As of every driver; and what was under way is scheduled and trained again."""
        self._restore(checkpoint, history)
        self._earlier = dict(checkpoint.earlier)
        state = self._engine.state
        for name, update in state.buffer.items():
            assert update.asked is not None
            made, index = update.asked[0] - 1, self.world.names.index_of(name)
            list(self._workshop.train(made + 1, self._earlier[made], [index], [update.row], paid=True))
        there = {self.world.names.index_of(n): given for n, given in self._at_work.items() if not given.away}
        for (index, given), examples in zip(there.items(), self._examples(list(there)), strict=True):
            self._schedule(index, given.step, examples, given.since)
        assert state.attempt is not None
        assert state.attempt.record is not None
        self._perform([m.Commit(state.attempt.record, 0)])

    @override
    def _handle(self, event: m.Event) -> None:
        super()._handle(m.DeadlinePassed(WORK) if event == m.DeadlinePassed(_WAKE) else event)
        if not self.fleet.devices.always_there and self._timers.get(_WAKE, 0.0) <= self.now:
            self._wake_when_somebody_comes()

    def _wake_when_somebody_comes(self) -> None:
        """Places that nobody could be found for are offered again when the next client comes online."""
        present = sum(not given.away for given in self._at_work.values())
        if present >= (self.world.job.round.concurrency or len(self.world.names)):
            return
        at = self.fleet.devices.next_arrival(self.now)
        if at is not None:
            self._timers[_WAKE] = at
            self._push(at, m.DeadlinePassed(_WAKE))

    @override
    def _instruct(self, step: m.Step, indices: Sequence[int]) -> None:
        if step.phase == m.EVALUATE:
            self._evaluate(step, indices)
            return
        for index, examples in zip(indices, self._examples(indices), strict=True):
            self._schedule(index, step, examples, self.now)

    @override
    def _leave(self, event: Gone) -> None:
        if self._works_on(event):
            super()._leave(event)

    def _works_on(self, event: Arrived | Gone) -> bool:
        """Whether the client is still at what it was asked for then."""
        given = self._at_work.get(self.world.names[event.index])
        return given is not None and given.step == event.step

    @override
    def _answer(self, event: Arrived) -> None:
        if not self._works_on(event) or event.index not in self._due:
            return
        if event.index not in self._answers:
            self._train_with(event)
        del self._due[event.index]
        self._deliver(event.step, *self._answers.pop(event.index))

    def _train_with(self, event: Arrived) -> None:
        """Runs the client that is due, with those of the same model that are due next."""
        steps = {self.world.names.index_of(name): given.step for name, given in self._at_work.items()}
        same = (i for i in self._due if i not in self._answers and steps.get(i) == event.step)
        attempt = self._engine.state.attempt
        wanted = self._batch - (len(attempt.updates) if attempt else 0) - len(self._answers)
        due = heapq.nsmallest(max(_TOGETHER, wanted), same, key=lambda index: (self._due[index], index))
        chosen = sorted(due)
        made = event.step.round - 1
        vector = self.model.vector if made == len(self.history) else self._earlier[made]
        for index in chosen:
            # What an update that was dropped had left with the client is not for this one.
            self._workshop.pending.pop(index, None)
        places = self._free_places(len(chosen))
        answers = self._workshop.train(event.step.round, vector, chosen, places)
        for done, (place, answer) in enumerate(answers, start=1):
            self._answers[self.world.names.index_of(answer.client)] = (place, answer)
            self.listener.answered(event.step, done, len(chosen))

    def _free_places(self, count: int) -> list[int]:
        """The first rows that hold nothing that is still wanted."""
        taken = {place for place, _ in self._answers.values()}
        taken.update(update.row for update in self._waiting().values())
        free = (place for place in range(self._capacity) if place not in taken)
        return [next(free) for _ in range(count)]

    def _waiting(self) -> dict[str, m.Update]:
        """Updates that have arrived and are in no model yet."""
        state = self._engine.state
        return {**(state.attempt.updates if state.attempt else {}), **state.buffer}

    @override
    def _replaced(self, record: m.RoundRecord, vector: Tensor) -> None:
        """Of the model that is replaced and the older ones, those stay that somebody works from."""
        state = self._engine.state
        needed = {given.round - 1 for given in state.at_work.values()}
        needed |= {update.asked[0] - 1 for update in state.buffer.values() if update.asked}
        known = {**self._earlier, record.round - 1: vector}
        self._earlier = {made: known[made] for made in sorted(needed)}
        self._taken = [self.world.names.index_of(n) for n in (*record.contributors, *record.excluded)]

    @override
    def _settle(self) -> None:
        waiting = map(self.world.names.index_of, self._engine.state.buffer)
        self._workshop.keep(self._taken, [*self._answers, *waiting])

    @override
    def _end_round(self) -> None:
        """What is under way goes on."""

    @override
    def _checkpoint(self) -> Checkpoint:
        pending = self._workshop.pending
        local = {index: pending[index] for index in self._taken if index in pending}
        engine = self._engine.snapshot()
        return Checkpoint(self.now, engine, self.model, self.server, local, self._earlier)
