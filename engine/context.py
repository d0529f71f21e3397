"""What every transition of the engine reads and writes: the state, the population, the actions to come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from roundtable.core.config import JobConfig
from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m
from roundtable.engine.population import Population
from roundtable.engine.selection import Candidate
from roundtable.engine.state import Attempt, ClientRecord, EngineState

MOST_TROUBLES = 8


class Context:
    """One job's state, and the small things that are done to it everywhere."""

    def __init__(self, job: JobConfig, state: EngineState, population: Population) -> None:
        self.job = job
        self.state = state
        self.population = population
        self.out: list[m.Action] = []

    def taken(self) -> list[m.Action]:
        """The actions so far; they are handed out once."""
        out, self.out = self.out, []
        return out

    def instruct(self, names: Iterable[str], now: float) -> None:
        """Asks those who are there to work on the phase that runs; marks the others as offline."""
        attempt = self.attempt()
        assert attempt.deadline is not None
        model = attempt.aggregated.model if attempt.aggregated else self.state.model
        for name in names:
            if self.population.is_online(name):
                self.mark(name, "available", now)
                self.out.append(m.Instruct(name, attempt.step, model, attempt.deadline, attempt.cohort))
            else:
                self.mark(name, "offline", now)

    def withdraw_awaited(self, reason: str) -> None:
        """Tells those who are still at work that it no longer matters."""
        attempt = self.state.attempt
        if attempt is None or attempt.phase not in (m.TRAIN, m.EVALUATE):
            return
        self.out.extend(m.Withdraw(name, attempt.step, reason) for name in attempt.awaited)

    def candidate(self, name: str) -> Candidate:
        """What selection may know of a client."""
        record, info = self.state.clients.get(name), self.population.info(name)
        if record is None:
            return Candidate(info)
        if info.examples is None:
            info = replace(info, examples=record.examples)
        return Candidate(info, record.selected, record.completed, record.last_round)

    def record(self, name: str) -> ClientRecord:
        """The client's record, made on first use."""
        return self.state.clients.setdefault(name, ClientRecord())

    def mark(self, name: str, state: m.ClientState, now: float, note: str = "") -> None:
        """The client is now in this state; `since` moves only if that is news."""
        record = self.record(name)
        if record.state != state or record.note != note:
            record.state, record.since, record.note = state, now, note

    def drop(self, failure: SiteFailure, now: float, action: str = "") -> None:
        """The site is no longer waited for in this phase; `action` where more was done than that."""
        attempt = self.attempt()
        del attempt.awaited[failure.site]
        attempt.lost.pop(failure.site, None)
        self.mark(failure.site, "dropped", now, failure.detail)
        detail = {"kind": failure.kind, "phase": failure.phase} | ({"action": action} if action else {})
        self.note("client_failed", str(failure), failure.site, detail)

    def trouble(self, failure: SiteFailure, action: str) -> None:
        """The site is still waited for; of each, the history holds only so many troubles of an attempt."""
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

    def note(
        self, kind: str, message: str, client: str = "", detail: Mapping[str, Any] | None = None
    ) -> None:
        """Adds to the job's history."""
        attempt = self.state.attempt
        where = (attempt.round, attempt.number) if attempt else (self.state.chronicle.done, 0)
        self.out.append(m.Note(kind, message, *where, client, detail or {}))

    def status(self, status: m.JobStatus, reason: str) -> None:
        """The job is now in this state."""
        changed = self.state.status != status
        self.state.status, self.state.reason = status, reason
        if changed:
            self.out.append(m.StatusChanged(status, reason))
