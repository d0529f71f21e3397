"""Buffered rounds: clients train all the time, and each full buffer of updates makes a new model.

FedBuff (Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1):
up to `concurrency` clients are at work, each from the model that was the newest when it was asked. The
K-th update closes the round; whoever is still at work goes on, and its update enters a later round with
a staleness, the number of models made since. Who could only come with more than `max_staleness` is told
to stop.

    fill → aggregate → evaluate → commit → the next round; training goes on beside all of it

A client is asked once for each attempt at most, and not again while its update waits: so (round, attempt,
train) stays the key under which everything is idempotent, and no client is in a buffer twice. A client
that fails leaves its place to whoever is drawn next: nothing else replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from roundtable.core.errors import SiteFailure
from roundtable.core.seeds import numpy_generator
from roundtable.engine import messages as m
from roundtable.engine.context import IN_LINE, JobContext
from roundtable.engine.policies.training_policy import (
    CheckModels,
    Combine,
    Decision,
    GiveUp,
    not_awaited,
    quorum_missed,
)
from roundtable.engine.selection import quorum
from roundtable.engine.state import BUSY, Assignment, Attempt, chosen_chain
from roundtable.engine.view import held_in_words

WORK = "work"
"""The timer of the earliest deadline of those at work."""


class BufferedTraining:
    """The `TrainingPolicy` of jobs with `[round] mode = "buffered"`."""

    _phase = m.TRAIN

    def __init__(self, context: JobContext) -> None:
        assert context.job.round.buffer is not None
        self._context = context
        self._job = context.job
        self._state = context.state
        self._population = context.population
        self._round = context.job.round
        self._size = context.job.round.buffer
        self._watched = math.inf

    def begin(self, now: float) -> Decision:
        """Begins to fill the buffer, with the updates that came while the last model was made."""
        attempt, state = self._context.attempt(), self._state
        if state.unchecked:
            return CheckModels()
        attempt.phase, attempt.target = m.TRAIN, self._size
        attempt.minimum = quorum(self._job.cohort, self._size)
        attempt.updates, state.buffer = state.buffer, {}
        message = f"round {attempt.round}: {len(attempt.updates)} of {self._size} updates are here already"
        detail = {"cohort": sorted(state.at_work), "minimum": attempt.minimum}
        self._context.note("round_started", message, detail=detail)
        self.watch_deadlines(now)
        return self.proceed(now)

    def client_joined(self, client: str, now: float) -> Decision:
        """Asks the client for its work again, or whoever is drawn for a place that is free."""
        assignment = self._state.at_work.get(client)
        if assignment is not None:
            assignment.away = False
            self._context.mark(client, "available", now)
            self._instruct(client, assignment, now)
        return self.proceed(now) if self._context.attempt().phase == m.TRAIN else None

    def proceed(self, now: float) -> Decision:
        """Combines a full buffer; otherwise keeps as many clients at work as may be."""
        attempt = self._context.attempt()
        if len(attempt.updates) >= attempt.target:
            return Combine("the buffer is full")
        self._ask_more(now)
        if not self._somebody_works():
            return self._starved(attempt, now)
        self._context.status("running", f"round {attempt.round} of {self._job.rounds}")
        attempt.deadline = None
        return None

    def client_failed(self, failure: SiteFailure, now: float) -> Decision:
        """Leaves the client's place to whoever is drawn next."""
        self._context.drop(failure, now)
        return self.proceed(now) if self._context.attempt().phase == m.TRAIN else None

    def timer_fired(self, timer: str, now: float) -> Decision:
        """Gives up on late clients; combines a quorum if nobody is at work at the end of the grace time."""
        attempt = self._context.attempt()
        if timer == WORK:
            self._give_up_on_late(now)
            return self.proceed(now) if attempt.phase == m.TRAIN else None
        if attempt.phase == m.TRAIN and timer == self._context.timer("grace"):
            self._ask_more(now)
            if attempt.deadline is not None and not self._somebody_works():
                return Combine("nobody else is there")
        return None

    def reopen(self, damaged: Mapping[str, str], now: float) -> Decision:
        """Fills the round again, without the damaged updates: their clients have other work by now."""
        attempt = self._context.attempt()
        attempt.phase, attempt.deadline = m.TRAIN, None
        for failure in self._context.take_out(damaged):
            name, lost = failure.site, attempt.lost.pop(failure.site)
            if lost.asked is not None:
                failure = replace(failure, round=lost.asked[0], attempt=lost.asked[1])
            attempt.failures[name] = failure
            self._context.note_failure(failure)
        attempt.updates, self._state.buffer = {**attempt.updates, **self._state.buffer}, {}
        return self.proceed(now)

    def restore(self, now: float) -> Decision:
        """Asks those at work again, with at least the grace time to find their way back."""
        for name, assignment in self._state.at_work.items():
            assignment.deadline = max(assignment.deadline, now + self._job.cohort.grace)
            assignment.away = not self._population.is_online(name)
            if not assignment.away:
                self._instruct(name, assignment, now)
        self.watch_deadlines(now)
        attempt = self._context.attempt()
        if attempt.phase != m.TRAIN:
            return None
        attempt.deadline = None
        return self.proceed(now)

    def close(self, reason: str, now: float) -> None:
        """Withdraws only work that would be too stale in the next round."""
        attempt = self._context.attempt()
        for name, assignment in list(self._state.at_work.items()):
            if attempt.round + 1 - assignment.round > self._round.max_staleness:
                self._give_up(name, "slow_node", self._too_stale(assignment.round, attempt.round + 1), now)
        attempt.cohort = tuple(sorted({*attempt.cohort, *attempt.updates, *attempt.failures}))

    def attempt_failed(self) -> None:
        """Keeps the updates, unless they are what could not be combined."""
        attempt = self._context.attempt()
        if attempt.phase == m.TRAIN:
            self._state.buffer = {**attempt.updates, **self._state.buffer}

    def settled(self, round: int) -> int:
        """Updates may still come for as many rounds back as they may be stale."""
        return max(0, round - self._round.max_staleness)

    def refusal(self, client: str, step: m.Step) -> str:
        """Says so where an update is too stale."""
        attempt = self._state.attempt
        if attempt is not None:
            made = attempt.phase in (m.AGGREGATE, m.EVALUATE, m.COMMIT)
            following = attempt.round + 1 if made else attempt.round
            if following - step.round > self._round.max_staleness:
                return self._too_stale(step.round, following)
        return not_awaited(client, step)

    def _somebody_works(self) -> bool:
        return any(not assignment.away for assignment in self._state.at_work.values())

    def _ask_more(self, now: float) -> None:
        present = sum(not assignment.away for assignment in self._state.at_work.values())
        limit = self._round.concurrency or len(self._population.known())
        self._ask(self._draw(limit - present) if present < limit else [], now)

    def _ask(self, chosen: Sequence[str], now: float) -> None:
        attempt = self._context.attempt()
        deadline = now + self._job.cohort.deadline
        for name in chosen:
            self._context.count_selection(name, now)
            assignment = Assignment(
                attempt.round, attempt.number, self._state.model, now, deadline, phase=self._phase
            )
            self._state.at_work[name] = assignment
            self._context.mark(name, "available", now)
            self._instruct(name, assignment, now)
        attempt.cohort += tuple(chosen)
        if chosen and deadline < self._watched:
            self.watch_deadlines(now)

    def _draw(self, count: int) -> list[str]:
        """Up to `count` of those who are there and idle, by the job's strategy."""
        self._state.draws += 1
        chance = numpy_generator(self._state.selection_seed, self._state.draws, "refill")
        return self._context.choose_available(
            count, available=self._idle, unavailable=len(self._state.at_work), chance=chance
        )

    def _idle(self, name: str) -> bool:
        """Neither at work, nor done or failed in this attempt."""
        attempt = self._context.attempt()
        failure = attempt.failures.get(name)
        here = failure is not None and (failure.round, failure.attempt) == (attempt.round, attempt.number)
        return name not in self._state.at_work and name not in attempt.updates and not here

    def _starved(self, attempt: Attempt, now: float) -> Decision:
        """Nobody is at work and nobody can be asked: a quorum is enough, after the grace time."""
        if len(attempt.updates) >= attempt.minimum:
            if attempt.deadline is None:
                attempt.deadline = now + self._job.cohort.grace
                self._context.set_timer("grace", attempt.deadline)
        elif attempt.failures and not self._state.at_work:
            return GiveUp(quorum_missed(attempt))
        elif not attempt.settled:
            attempt.settled = True
            said = ["nobody is there who could train; waiting", *held_in_words(self._population)]
            self._context.note("waiting_for_clients", "; ".join(said))
        return None

    def _too_stale(self, asked: int, round: int) -> str:
        return (
            f"its model is {round - asked} rounds old in round {round}; "
            f"round.max_staleness = {self._round.max_staleness}"
        )

    def _instruct(self, name: str, assignment: Assignment, now: float) -> None:
        """Asks for the work; harmless where the client is at it already."""
        counted = self._context.counted(name)
        self._context.out.append(
            m.Instruct(
                name,
                assignment.step,
                assignment.model,
                self._due(assignment, now),
                counted=counted,
                hops=self._state.hops,
                encoding=chosen_chain(self._state, name),
            )
        )

    def watch_deadlines(self, now: float) -> None:
        """Sets the timer of whoever may be late first."""
        moments = (
            given.deadline + self._context.longest_line
            if given.line.since is not None
            else self._due(given, now)
            for given in self._state.at_work.values()
        )
        self._watched = min(moments, default=math.inf)
        if self._watched < math.inf:
            self._context.out.append(m.SetTimer(WORK, self._watched))

    def _due(self, given: Assignment, now: float) -> float:
        """When the work is late; the time that it stood in line at its silo does not count."""
        return given.deadline + min(given.line.until(now), self._context.longest_line)

    def _give_up_on_late(self, now: float) -> None:
        for name, assignment in list(self._state.at_work.items()):
            if self._due(assignment, now) > now:
                continue
            kind, reason = "node_failure" if assignment.away else "slow_node", "no update before the deadline"
            if assignment.line.since is not None:
                kind, reason = BUSY, IN_LINE
            self._give_up(name, kind, reason, now)
        self.watch_deadlines(now)

    def _give_up(self, name: str, kind: str, reason: str, now: float) -> None:
        assignment = self._state.at_work[name]
        self._context.out.append(m.Withdraw(name, assignment.step, reason))
        self._context.drop(
            SiteFailure(name, assignment.round, assignment.attempt, m.TRAIN, kind, reason), now
        )
