"""What the engine and its training policy share: state, population, and the actions of this call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from roundtable.core.config import JobConfig
from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m
from roundtable.engine.encoding_choice import EncodingChoice
from roundtable.engine.population import Population
from roundtable.engine.selection import Candidate, SelectionFailed, Strategy, begins_apart, undeclared
from roundtable.engine.state import (
    BUSY,
    Attempt,
    ClientRecord,
    EngineState,
    InLine,
    chosen_chain,
    hops_after,
)
from roundtable.engine.steps_by_speed import pace_missed, pace_seen, steps_by_pace

MOST_TROUBLES = 8
IN_LINE = "its step stood in line behind other work of the silo for longer than cohort.line allows"


class JobContext:
    """One job's state, with the operations on it that more than one transition needs."""

    def __init__(
        self, job: JobConfig, state: EngineState, population: Population, strategy: Strategy
    ) -> None:
        self.job = job
        self.state = state
        self.population = population
        self._strategy = strategy
        self.out: list[m.Action] = []

    def take_actions(self) -> list[m.Action]:
        """The actions since the last call."""
        out, self.out = self.out, []
        return out

    def works_on(self, client: str, step: m.Step) -> bool:
        """Whether the client was asked for this step and has neither answered nor failed."""
        assignment, attempt = self.state.given(client), self.state.attempt
        if assignment is not None and assignment.step == step:
            return True
        return attempt is not None and attempt.step == step and client in attempt.awaited

    def awaits_somebody_online(self) -> bool:
        """Whether anybody of whom the phase awaits an answer is there."""
        return any(map(self.population.is_online, self.attempt().awaited))

    def instruct(self, names: Iterable[str], now: float) -> None:
        """Asks those who are there to work on the phase that runs; marks the others as offline."""
        attempt = self.attempt()
        assert attempt.deadline is not None
        model = attempt.aggregated.model if attempt.aggregated else attempt.source or self.state.model
        cohort, hops = attempt.cohort, hops_after(self.state)
        if attempt.failures:
            cohort = tuple(name for name in cohort if name not in attempt.failures)
        for name in names:
            if self.population.is_online(name):
                self.mark(name, "available", now)
                counted, due = self.counted(name), self.due(name, now)
                training = attempt.phase == m.TRAIN
                steps = self.given(name) if training else None
                encoding = chosen_chain(self.state, name) if training else ""
                work = attempt.group.get(name) if training else None
                kept = (work.round, work.attempt) if work is not None else None
                self.out.append(
                    m.Instruct(name, attempt.step, model, due, cohort, counted, hops, steps, encoding, kept)
                )
            else:
                self.mark(name, "offline", now)

    def assign(self, names: Collection[str], now: float) -> dict[str, int]:
        """Gives clients that are asked now their steps, where these follow from speed; else nothing.

        Once in a round: in another attempt, and when it comes back, a client has the same. How many they are
        follows from how fast the others of the cohort are. The time of who is not there is not taken.
        """
        attempt, most = self.attempt(), self.job.algorithm.steps
        if self.job.algorithm.work != "by_speed" or most is None:
            return {}
        paces = {name: self.record(name).pace for name in {*attempt.cohort, *names}}
        found = steps_by_pace(paces, most)
        for name in names:
            record = self.record(name)
            if record.given is None or record.given[0] != attempt.round:
                record.given = (attempt.round, found[name])
            record.asked = now if self.population.is_online(name) else None
        return {name: steps for name in sorted(names) if (steps := self.given(name))}

    def given(self, name: str) -> int | None:
        """The steps that the client was given in this round by its speed."""
        record, attempt = self.state.clients.get(name), self.state.attempt
        if record is None or record.given is None or attempt is None or record.given[0] != attempt.round:
            return None
        return record.given[1]

    def see_pace(self, name: str, now: float) -> int | None:
        """The client has delivered: the steps that it was given, None where the job says them for all."""
        record, steps = self.record(name), self.given(name)
        if steps and record.asked is not None:
            record.pace = pace_seen(record.pace, now - record.asked, steps)
        record.asked = None
        return steps

    def miss_pace(self, name: str, now: float) -> None:
        """The client had time enough and has not delivered."""
        record, steps = self.record(name), self.given(name)
        if steps and record.asked is not None:
            record.pace = pace_missed(record.pace, now - record.asked, steps)
        record.asked = None

    def forget_time(self, names: Iterable[str]) -> None:
        """What these take from now on tells nothing of their speed: they, or we, were not there meanwhile."""
        for name in names:
            if (record := self.state.clients.get(name)) is not None:
                record.asked = None

    def counted(self, name: str) -> tuple[int, int] | None:
        """(round, attempt) of the client's newest update that is in the newest model, or in one before it."""
        attempt, record = self.state.attempt, self.state.clients.get(name)
        if attempt is not None and attempt.aggregated and name not in attempt.aggregated.excluded:
            update = attempt.updates.get(name)
            if update is not None:
                return update.asked or (attempt.round, attempt.number)
        return record.counted if record else None

    def withdraw_awaited(self, reason: str) -> None:
        """Tells those whose answer the phase awaits that it no longer matters."""
        attempt = self.state.attempt
        if attempt is None or attempt.phase not in (m.CHECK, m.TRAIN, m.EVALUATE):
            return
        self.out.extend(m.Withdraw(name, attempt.step, reason) for name in attempt.awaited)

    def due(self, name: str, now: float) -> float:
        """When the client's answer is late: its time does not run while its work stands in line."""
        attempt = self.attempt()
        assert attempt.deadline is not None
        line = attempt.lines.get(name)
        return (
            attempt.deadline if line is None else attempt.deadline + min(line.until(now), self.longest_line)
        )

    @property
    def longest_line(self) -> float:
        """Seconds in line after which the deadline runs on: no silo holds a phase for ever."""
        cohort, attempt = self.job.cohort, self.state.attempt
        if cohort.line is not None:
            return cohort.line
        evaluates = attempt is not None and attempt.phase == m.EVALUATE
        return self.job.evaluation.deadline if evaluates else cohort.deadline

    def late(self, now: float) -> list[str]:
        """Once the deadline has passed: who of those whose answer is awaited is late."""
        attempt = self.attempt()
        now = max(now, attempt.deadline or 0.0)
        return [name for name in attempt.awaited if self.due(name, now) <= now]

    def watch_deadlines(self, now: float) -> None:
        """Sets the timer for the next one who may be late, where somebody stood in line past the deadline."""
        attempt = self.attempt()
        if attempt.deadline is None or not attempt.awaited or now < attempt.deadline:
            return
        last = attempt.deadline + self.longest_line
        self.set_timer(
            "deadline", min(last if self.waits(name) else self.due(name, now) for name in attempt.awaited)
        )

    def waits(self, name: str) -> bool:
        """Whether the client's work in this phase stands in line at it now."""
        line = self.attempt().lines.get(name)
        return line is not None and line.since is not None

    def stands_in_line(self, client: str, step: m.Step, waits: bool, now: float) -> bool:
        """Notes whether the client's work waits for its turn at its silo; whether that has just come."""
        assignment, attempt = self.state.at_work.get(client), self.state.attempt
        if assignment is not None and assignment.step == step:
            line = assignment.line
        else:
            assert attempt is not None
            line = (
                attempt.lines.setdefault(client, InLine()) if waits else attempt.lines.get(client, InLine())
            )
        began = line.since is not None and not waits
        if waits:
            self.forget_time([client])
        line.turn(waits, now)
        return began

    def unanswered(self, name: str, reason: str) -> tuple[str, str]:
        """(kind, detail) of the failure of a client that has not answered in time."""
        if self.waits(name):
            return BUSY, IN_LINE
        return ("slow_node" if self.population.is_online(name) else "node_failure"), reason

    def candidate(self, name: str) -> Candidate:
        """What selection may know of a client."""
        return Candidate.of(self.population.info(name), self.state.clients.get(name))

    def choose(self, names: Sequence[str], size: int, chance: np.random.Generator) -> list[str]:
        """The names that the job's strategy chooses, in order. Raises SelectionFailed where it cannot."""
        told = (self.population.info(name).metadata for name in chain(names, self.population.known()))
        if (why := undeclared(self.job.cohort, told)) is not None:
            raise SelectionFailed(why)
        return sorted(self._strategy(names, size, chance, self.candidate, self.job.cohort))

    def choose_available(
        self, count: int, available: Callable[[str], bool], unavailable: int, chance: np.random.Generator
    ) -> list[str]:
        """Up to `count` of the clients that are free and `available`.

        `unavailable` is about how many are not: where these are few, a uniform draw costs nothing that grows
        with the population.
        """
        known = self.population.known()
        if self.job.cohort.strategy == "uniform" and len(known) > 8 * (count + unavailable):
            drawn: dict[str, None] = {}
            for _ in range(16 * count + 64):
                name = known[int(chance.integers(len(known)))]
                if self.population.is_free(name) and available(name):
                    drawn[name] = None
                if len(drawn) == count:
                    return sorted(drawn)
        names = [name for name in self.population.free() if available(name)]
        return self.choose(names, min(count, len(names)), chance) if names else []

    def record(self, name: str) -> ClientRecord:
        """The client's record, made on first use."""
        record = self.state.clients.get(name)
        if record is None:
            record = self.state.clients[name] = ClientRecord()
        return record

    def deadline_for(self, cohort: Sequence[str]) -> float:
        """Seconds that these clients have to train: as the job says, or as long as most of them took last.

        That is not known before half of them have answered once.
        """
        table = self.job.cohort
        records = (self.state.clients.get(name) for name in cohort)
        took = [record.seconds for record in records if record is not None and record.seconds is not None]
        if table.deadline_percentile is None or 2 * len(took) < max(1, len(cohort)):
            return table.deadline
        likely = table.deadline_slack * float(np.quantile(took, table.deadline_percentile))
        return min(table.deadline, likely) if likely > 0 else table.deadline

    def count_selection(self, name: str, now: float) -> None:
        """The client has been chosen to train in the round that runs."""
        record = self.record(name)
        record.called, record.course = now, ()
        if begins_apart(self.job, self.state, self.attempt().round):
            record.selected += 1
            record.last_round = self.attempt().round
        if self.job.transfer.automatic:
            self._choose_encoding(name, record, now)

    def _choose_encoding(self, name: str, record: ClientRecord, now: float) -> None:
        choice = record.choice
        if choice is None:
            choice = record.choice = EncodingChoice(link=self.population.info(name).link)
        choice.asked, before = now, choice.encoding
        why = choice.decide(self.job.transfer, self.attempt().round, self.updates_wanted)
        if why and before:
            detail = {"encoding": choice.encoding, "before": before}
            self.note(
                "encoding_changed", f"{name} sends {choice.encoding} after {before}: {why}", name, detail
            )

    def done(self, client: str, update: m.Update, now: float) -> list[list[Any]]:
        """The client's update is here; one that is sent again tells the same of it once more. Its course."""
        record = self.record(client)
        course = record.passed(now)
        self.mark(client, "done", now)
        record.examples = update.examples or record.examples
        if record.choice is not None and update.transfer is not None:
            record.choice.learn(self.job.transfer, update.transfer, self.updates_wanted, now)
        return course

    @property
    def updates_wanted(self) -> int:
        """How many updates a round's mean is about to be over."""
        return self.job.round.buffer or self.job.cohort.size or max(1, len(self.population.known()))

    def mark(self, name: str, state: m.ClientState, now: float, note: str = "") -> None:
        """The client is now in this state; `since` moves only if that is news."""
        record = self.record(name)
        record.turn(state, now)
        if record.state != state or record.note != note:
            record.state, record.since, record.note = state, now, note

    def drop(self, failure: SiteFailure, now: float, action: str = "") -> None:
        """The client is no longer waited for at this step; `action` where more was done than that."""
        attempt, client = self.attempt(), failure.site
        if failure.phase in (m.CHECK, m.TRAIN):
            attempt.failures[client] = failure
        elif failure.phase == m.EVALUATE and failure.kind == "task_error":
            attempt.unmeasured = attempt.unmeasured or f"{client}: {failure.detail}"
        attempt.awaited.pop(client, None)
        attempt.lost.pop(client, None)
        if failure.phase == m.TRAIN:
            record, busy = self.record(client), failure.kind == BUSY
            record.selected -= busy
            record.failed += not busy
        self.state.at_work.pop(client, None)
        self.state.ready.pop(client, None)
        told = {"course": course} if (course := self.record(client).passed(now)) else {}
        self.mark(client, "dropped", now, failure.detail)
        self.note_failure(failure, action, **told)

    def note_failure(self, failure: SiteFailure, action: str = "", **more: Any) -> None:
        """Adds a client's failure to the job's history, with what `more` is told of it."""
        detail: dict[str, Any] = {"kind": failure.kind, "phase": failure.phase, **more}
        if failure.phase == m.TRAIN:
            detail |= self._plight(failure.site)
        if action:
            detail["action"] = action
        self.note("client_failed", str(failure), failure.site, detail)

    def _plight(self, client: str) -> dict[str, int]:
        """How many clients of the cohort have failed in this attempt, how many more may before the quorum is
        missed, and how often this one has since its last update."""
        attempt = self.attempt()
        plight = {"failed": len(attempt.failures), "cohort": len(attempt.cohort)}
        if self.job.round.mode == "synchronous":
            plight["spare"] = len(attempt.updates) + len(attempt.awaited) - attempt.minimum
        return plight | {"on_end": self.record(client).failed}

    def take_out(self, damaged: Mapping[str, str]) -> list[SiteFailure]:
        """Removes damaged updates (client → what is wrong) from those to be combined, into `attempt.lost`.

        Nobody's work counts as completed any more: training goes on.
        """
        attempt = self.attempt()
        for name in attempt.updates:
            self.record(name).completed -= 1
        failures = []
        for name, detail in sorted(damaged.items()):
            attempt.lost[name] = attempt.updates.pop(name)
            failure = SiteFailure(name, attempt.round, attempt.number, m.TRAIN, "data_corruption", detail)
            failures.append(failure)
        return failures

    def trouble(self, failure: SiteFailure, action: str) -> None:
        """Notes a failure of a client that is still waited for: `MOST_TROUBLES` of each in an attempt."""
        attempt = self.attempt()
        count = attempt.troubles.get(failure.site, 0)
        if count < MOST_TROUBLES:
            attempt.troubles[failure.site] = count + 1
            detail = {"kind": failure.kind, "phase": failure.phase, "action": action}
            message = f"{failure.site}, {failure.phase}: {failure.detail}; {action}"
            self.note("client_troubled", message, failure.site, detail)

    def attempt(self) -> Attempt:
        """The attempt that runs; only for transitions that have one."""
        assert self.state.attempt is not None
        return self.state.attempt

    def timer(self, kind: str) -> str:
        """The name of a timer of the phase that runs; timers of other phases are stale."""
        step = self.attempt().step
        return f"{kind}:{step.round}.{step.attempt}.{step.phase}"

    def set_timer(self, kind: str, at: float) -> None:
        """Asks for a timer of the phase that runs; it replaces an earlier one of the same kind."""
        self.out.append(m.SetTimer(self.timer(kind), at))

    def extend_deadline(self, whole: float, now: float) -> None:
        """After a restart: leaves agents at least the grace time to find their way back.

        The deadline never lies further ahead than `whole`, the length of the phase: the clock may have been
        set back.
        """
        attempt, grace = self.attempt(), self.job.cohort.grace
        attempt.deadline = min(max(attempt.deadline or 0.0, now + grace), now + max(whole, grace))
        self.set_timer("deadline", attempt.deadline)

    def note(
        self, kind: str, message: str, client: str = "", detail: Mapping[str, Any] | None = None
    ) -> None:
        """Adds to the job's history."""
        attempt = self.state.attempt
        where = (attempt.round, attempt.number) if attempt else (self.state.summary.done, 0)
        self.out.append(m.Note(kind, message, *where, client, detail or {}))

    def status(self, status: m.JobStatus, reason: str) -> None:
        """The job is now in this state."""
        changed = self.state.status != status
        self.state.status, self.state.reason = status, reason
        if changed:
            self.out.append(m.StatusChanged(status, reason))
