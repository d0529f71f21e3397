"""Buffered rounds: clients train all the time, and each full buffer of updates makes a new model.

FedBuff (Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1):
up to `concurrency` clients are at work, each from the model that was the newest when it was asked. The
K-th update closes the round; whoever is still at work goes on, and its update enters a later round with
a staleness, the number of models made since. Who could only come with more than `max_staleness` is told
to stop.

    fill → aggregate → evaluate → commit → the next round; training goes on beside all of it

The same events and actions as in `RoundEngine`, of which this is the other mode. A client is asked once
for each attempt at most, and not again while its update waits: so (round, attempt, train) stays the key
under which all is idempotent, and no client is in a buffer twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from typing_extensions import override

from roundtable.core.config import JobConfig, RoundTable
from roundtable.core.errors import SiteFailure
from roundtable.core.seeds import numpy_generator
from roundtable.engine import messages as m
from roundtable.engine.context import Context
from roundtable.engine.phases import Phases
from roundtable.engine.round_engine import RoundEngine
from roundtable.engine.selection import STRATEGIES, quorum
from roundtable.engine.state import Assignment, Attempt

WORK = "work"
"""The timer of the earliest deadline of those at work."""


def engine_for(job: JobConfig) -> type[RoundEngine]:
    """The engine of the job's `[round] mode`."""
    return BufferedEngine if job.round.mode == "buffered" else RoundEngine


class BufferedPhases(Phases):
    """The transitions of a buffered round, beside which clients train."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._round: RoundTable = context.job.round
        assert self._round.buffer is not None
        self._size = self._round.buffer

    @override
    def begin_selection(self, now: float) -> None:
        """The round begins to fill, with what came while the last model was made."""
        attempt, state = self._context.attempt(), self._state
        attempt.phase, attempt.target = m.TRAIN, self._size
        attempt.minimum = quorum(self._job.cohort, self._size)
        attempt.updates, state.buffer = state.buffer, {}
        said = f"round {attempt.round}: {len(attempt.updates)} of {self._size} updates are here already"
        detail = {"cohort": sorted(state.at_work), "minimum": attempt.minimum}
        self._context.note("round_started", said, detail=detail)
        self.watch_deadlines()
        self.check(now)

    @override
    def check(self, now: float) -> None:
        """Closes a full buffer; keeps as many at work as may be while it fills."""
        attempt = self._context.attempt()
        if attempt.phase != m.TRAIN:
            super().check(now)
        elif len(attempt.updates) >= attempt.target:
            self._end_training("the buffer is full", now)
        else:
            self._ask_more(attempt, now)
            if any(not given.away for given in self._state.at_work.values()):
                self._context.status("running", f"round {attempt.round} of {self._job.rounds}")
                attempt.deadline = None
            else:
                self._starved(attempt, now)

    def _ask_more(self, attempt: Attempt, now: float) -> None:
        present = sum(not given.away for given in self._state.at_work.values())
        limit = self._round.concurrency or len(self._population.known())
        chosen = self._draw(limit - present) if present < limit else []
        deadline = now + self._job.cohort.deadline
        for name in chosen:
            record = self._context.record(name)
            record.selected += 1
            record.last_round = attempt.round
            given = Assignment(attempt.round, attempt.number, self._state.model, now, deadline)
            self._state.at_work[name] = given
            self._context.mark(name, "available", now)
            self.instruct(name, given)
        attempt.cohort += tuple(chosen)
        if chosen and len(self._state.at_work) == len(chosen):
            self.watch_deadlines()

    def _draw(self, count: int) -> list[str]:
        """Up to `count` of those who are there and idle, by the job's strategy."""
        cohort, known = self._job.cohort, self._population.known()
        self._state.draws += 1
        chance = numpy_generator(self._state.selection_seed, self._state.draws, "refill")
        if cohort.strategy == "uniform" and len(known) > 8 * (count + len(self._state.at_work)):
            # Where most are idle, drawing until it fits costs nothing that grows with the population.
            found: dict[str, None] = {}
            for _ in range(16 * count + 64):
                name = known[int(chance.integers(len(known)))]
                if self._population.is_online(name) and self._idle(name):
                    found[name] = None
                if len(found) == count:
                    return sorted(found)
        idle = [name for name in self._population.online() if self._idle(name)]
        if not idle:
            return []
        wanted = min(count, len(idle))
        return sorted(STRATEGIES[cohort.strategy](idle, wanted, chance, self._context.candidate, cohort))

    def _idle(self, name: str) -> bool:
        """Neither at work, nor done or failed in this attempt."""
        attempt = self._context.attempt()
        failure = attempt.failures.get(name)
        here = failure is not None and (failure.round, failure.attempt) == (attempt.round, attempt.number)
        return name not in self._state.at_work and name not in attempt.updates and not here

    def _starved(self, attempt: Attempt, now: float) -> None:
        """Nobody is at work and nobody can be asked: a quorum is enough, after the grace time."""
        if len(attempt.updates) >= attempt.minimum:
            if attempt.deadline is None:
                attempt.deadline = now + self._job.cohort.grace
                self._context.out.append(m.SetTimer(self._context.timer("grace"), attempt.deadline))
        elif attempt.failures and not self._state.at_work:
            self.fail_attempt(self._quorum_missed(attempt), now)
        elif not attempt.settled:
            attempt.settled = True
            self._context.note("waiting_for_clients", "nobody is there who could train; waiting")

    @override
    def go_on_without_those_offline(self, now: float) -> None:
        """The grace time is over: combines a quorum of updates if still nobody is at work."""
        attempt = self._context.attempt()
        if attempt.phase != m.TRAIN:
            super().go_on_without_those_offline(now)
            return
        self._ask_more(attempt, now)
        if attempt.deadline is not None and all(given.away for given in self._state.at_work.values()):
            self._end_training("nobody else is there", now)

    @override
    def _end_training(self, reason: str, now: float) -> None:
        attempt = self._context.attempt()
        for name, given in list(self._state.at_work.items()):
            if attempt.round + 1 - given.round > self._round.max_staleness:
                reason = self.too_old(given.round, attempt.round + 1)
                self._withdraw(name, reason)
                self.give_up(name, "slow_node", reason, now)
        attempt.cohort = tuple(sorted({*attempt.cohort, *attempt.updates, *attempt.failures}))
        super()._end_training(reason, now)

    def too_old(self, asked: int, round: int) -> str:
        """Why an update that was asked for in round `asked` cannot enter `round`."""
        return (
            f"its model is {round - asked} rounds old in round {round}; "
            f"round.max_staleness = {self._round.max_staleness}"
        )

    @override
    def commit_action(self, record: m.RoundRecord) -> m.Commit:
        """Updates may still come for as many rounds back as they may be stale."""
        return m.Commit(record, settled=max(0, record.round - self._round.max_staleness))

    @override
    def fail_attempt(self, reason: str, now: float) -> None:
        """Another attempt; updates are kept unless they are what could not be combined."""
        attempt = self._context.attempt()
        if attempt.phase == m.TRAIN:
            self._state.buffer = {**attempt.updates, **self._state.buffer}
        super().fail_attempt(reason, now)

    @override
    def replace_damaged(self, damaged: Mapping[str, str], now: float) -> None:
        """The round fills again, without them: their clients have other work by now."""
        attempt = self._context.attempt()
        attempt.phase, attempt.deadline = m.TRAIN, None
        for failure in self.take_out(damaged):
            name, lost = failure.site, attempt.lost.pop(failure.site)
            if lost.asked is not None:
                failure = replace(failure, round=lost.asked[0], attempt=lost.asked[1])
            attempt.failures[name] = failure
            detail = {"kind": failure.kind, "phase": failure.phase}
            self._context.note("client_failed", str(failure), name, detail)
        attempt.updates, self._state.buffer = {**attempt.updates, **self._state.buffer}, {}
        self.check(now)

    def instruct(self, name: str, given: Assignment) -> None:
        """Asks for the work, again if need be; without effect on who is at it already."""
        self._context.out.append(m.Instruct(name, given.step, given.model, given.deadline))

    def watch_deadlines(self) -> None:
        """They run out in the order in which clients were asked: one timer is enough."""
        for given in self._state.at_work.values():
            self._context.out.append(m.SetTimer(WORK, given.deadline))
            return

    def deadlines(self, now: float) -> None:
        """Gives up those whose time is over."""
        for name, given in list(self._state.at_work.items()):
            if given.deadline > now:
                break
            self._withdraw(name, "the deadline has passed")
            kind = "node_failure" if given.away else "slow_node"
            self.give_up(name, kind, "no update before the deadline", now)
        self.watch_deadlines()

    def give_up(self, name: str, kind: str, detail: str, now: float, trace: str = "") -> None:
        """The client is no longer at work, and the round's record says why."""
        given = self._state.at_work.pop(name)
        failure = SiteFailure(name, given.round, given.attempt, m.TRAIN, kind, detail, trace)
        if self._state.attempt is not None:
            self._state.attempt.failures[name] = failure
        self._context.mark(name, "dropped", now, detail)
        self._context.note("client_failed", str(failure), name, {"kind": kind})

    def _withdraw(self, name: str, reason: str) -> None:
        self._context.out.append(m.Withdraw(name, self._state.at_work[name].step, reason))

    @override
    def _stop_now(self, status: m.JobStatus, reason: str) -> None:
        for name in self._state.at_work:
            self._withdraw(name, f"the job is {status}")
        self._state.at_work, self._state.buffer = {}, {}
        super()._stop_now(status, reason)


class BufferedEngine(RoundEngine):
    """One job's buffered rounds."""

    _phases: BufferedPhases

    @override
    def _make_phases(self) -> BufferedPhases:
        return BufferedPhases(self._context)

    @override
    def outstanding(self, now: float) -> list[m.Action]:
        """As of every engine; and those at work are asked again, with time to find their way back."""
        attempt = self.state.attempt
        if attempt is None or self.state.status not in ("waiting", "running"):
            return []
        actions = [] if attempt.phase == m.TRAIN else super().outstanding(now)
        for name, given in self.state.at_work.items():
            given.deadline = max(given.deadline, now + self.job.cohort.grace)
            given.away = not self.population.is_online(name)
            if not given.away:
                self._phases.instruct(name, given)
        self._phases.watch_deadlines()
        if attempt.phase == m.TRAIN:
            attempt.deadline = None
            self._phases.check(now)
        return actions + self._context.taken()

    @override
    def wants(self, client: str, step: m.Step) -> Literal["wanted", "duplicate", "stale"]:
        """An update is wanted from whoever is at work on that step, however many rounds ago it was asked."""
        given, attempt = self.state.at_work.get(client), self.state.attempt
        if given is not None and given.step == step:
            return "wanted"
        held = self.state.buffer.get(client) or (attempt.updates.get(client) if attempt else None)
        same = held is not None and held.asked == (step.round, step.attempt) and step.phase == m.TRAIN
        return "duplicate" if same else "stale"

    @override
    def refusal(self, client: str, step: m.Step) -> str:
        """Says so where an update is too old."""
        attempt = self.state.attempt
        if attempt is not None:
            made = attempt.phase in (m.AGGREGATE, m.EVALUATE, m.COMMIT)
            following = attempt.round + 1 if made else attempt.round
            if following - step.round > self.job.round.max_staleness:
                return self._phases.too_old(step.round, following)
        return super().refusal(client, step)

    @override
    def _on_joined(self, event: m.ClientJoined, now: float) -> None:
        super()._on_joined(event, now)
        if not event.online or self.state.attempt is None:
            return
        name = event.info.name
        given = self.state.at_work.get(name)
        if given is not None:
            given.away = False
            self._context.mark(name, "available", now)
            self._phases.instruct(name, given)
        if self.state.attempt.phase == m.TRAIN:
            self._phases.check(now)

    @override
    def _on_left(self, event: m.ClientLeft, now: float) -> None:
        given = self.state.at_work.get(event.client)
        if given is None:
            super()._on_left(event, now)
            return
        self.population.leave(event.client)
        given.away = True
        self._context.mark(event.client, "offline", now)
        said = f"{event.client} is offline; it can still deliver"
        self._context.note("client_offline", said, event.client)
        self._go_on(now)

    @override
    def _on_work_started(self, event: m.WorkStarted, now: float) -> None:
        given = self.state.at_work.get(event.client)
        if given is not None and given.step == event.step:
            self._context.mark(event.client, event.state, now)
        else:
            super()._on_work_started(event, now)

    @override
    def _on_update(self, event: m.UpdateArrived, now: float) -> None:
        client = event.update.client
        if self.wants(client, event.step) != "wanted":
            return
        attempt, given = self._context.attempt(), self.state.at_work.pop(client)
        update = replace(event.update, asked=(given.round, given.attempt))
        (attempt.updates if attempt.phase == m.TRAIN else self.state.buffer)[client] = update
        self._context.mark(client, "done", now)
        record = self.state.clients[client]
        record.examples = update.examples or record.examples
        detail = {"examples": update.examples, **vars(update.vector), "asked": given.round}
        self._context.note("update_received", f"{client} delivered its update", client, detail)
        self._go_on(now)

    @override
    def _on_client_failed(self, event: m.ClientFailed, now: float) -> None:
        failure = event.failure
        given = self.state.at_work.get(failure.site)
        if given is None or given.step != event.step:
            super()._on_client_failed(event, now)
            return
        self._phases.give_up(failure.site, failure.kind, failure.detail, now, failure.trace)
        self._go_on(now)

    @override
    def _on_troubled(self, event: m.Troubled, now: float) -> None:
        given = self.state.at_work.get(event.failure.site)
        if given is not None and given.step == event.step and self.state.attempt is not None:
            self._context.trouble(event.failure, event.action)
        else:
            super()._on_troubled(event, now)

    @override
    def _on_deadline(self, event: m.DeadlinePassed, now: float) -> None:
        if event.timer == WORK and self.state.attempt is not None:
            self._phases.deadlines(now)
            self._go_on(now)
        else:
            super()._on_deadline(event, now)

    def _go_on(self, now: float) -> None:
        """Only a round that fills cares who is at work."""
        if self._context.attempt().phase == m.TRAIN:
            self._phases.check(now)
