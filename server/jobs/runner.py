"""One job's driver: events go in, transactions and messages come out.

What has happened is handed to the engine in batches. Before anything that the engine then wants is
done, one transaction makes durable what it decided: snapshot, events, updates, and a committed
round's record, all or nothing. If the database is away, the driver waits for it and the job stands
still; nothing has been promised to anybody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig
from roundtable.core.errors import SiteFailure, StorageError
from roundtable.core.failpoints import failpoint
from roundtable.core.layout import Layout
from roundtable.core.observability.logs import belongs_to
from roundtable.engine import EngineView, RoundEngine, record_to_plain
from roundtable.engine import messages as m
from roundtable.server.jobs.actions import Effects, Services
from roundtable.server.operations.incidents import fault_of, storage_fault
from roundtable.server.store import FINAL, ArtifactRow, EventRow, JobRow, Transition, UpdateRow
from roundtable.server.store.database import LeaseLost
from roundtable.server.store.jobs import apply

log = logging.getLogger("roundtable.server.jobs.runner")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# Lost with a crash, these are said again: evaluations are asked for once more.
_QUIET = (m.WorkStarted, m.ClientJoined, m.ClientLeft, m.Evaluated)

Verdict = Literal["wanted", "duplicate", "stale"]


@dataclass
class Arrival:
    """Something that happened, the rows that belong to it, and who waits to hear that it is durable."""

    event: m.Event
    update: UpdateRow | None = None
    artifacts: tuple[ArtifactRow, ...] = ()
    done: asyncio.Future[Verdict] | None = None
    verdict: Verdict = "wanted"


@dataclass
class Batch:
    """What one transaction has to hold, and what is to be done after it."""

    events: list[EventRow] = field(default_factory=list)
    updates: list[UpdateRow] = field(default_factory=list)
    artifacts: list[ArtifactRow] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    effects: list[m.Action] = field(default_factory=list)
    worth_writing: bool = False


class JobRunner:
    """Drives one job's engine until the job ends."""

    def __init__(
        self,
        row: JobRow,
        job: JobConfig,
        layout: Layout,
        engine: RoundEngine,
        effects: Effects,
        services: Services,
        sequence: int,
    ) -> None:
        self.row, self.job, self.layout = row, job, layout
        self.effects = effects
        self._engine, self._services, self._sequence = engine, services, sequence
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._trouble = ""
        self._over = False
        effects.connect(self.tell, self.notify)

    @property
    def final(self) -> bool:
        """Whether the job has ended for good, durably."""
        return self.row.status in FINAL

    def post(self, event: m.Event) -> None:
        """Something has happened; nobody waits for the outcome."""
        self._queue.put_nowait(Arrival(event))

    def give_up_on(self, step: m.Step, failure: SiteFailure) -> None:
        """A silo will not answer."""
        self.post(m.ClientFailed(step, failure))
        self.effects.failed(failure)

    async def tell(
        self, event: m.Event, artifacts: tuple[ArtifactRow, ...] = (), update: UpdateRow | None = None
    ) -> Verdict:
        """Something has happened; returns once it is durable. The verdict is about an update that arrived."""
        if self._over:
            return "stale"
        done: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(Arrival(event, update, artifacts, done))
        return await done

    def wants(self, client: str, step: m.Step) -> Verdict:
        """What an upload would be: asked before a byte of it is accepted."""
        return self._engine.wants(client, step)

    def lost(self, client: str, step: m.Step) -> str:
        """The digest of the update that was accepted for this step, is damaged and wanted again; or ""."""
        found = self._engine.lost(client, step)
        return found.digest if found is not None else ""

    def refusal(self, client: str, step: m.Step) -> str:
        """Why an update is stale."""
        return self._engine.refusal(client, step)

    def may_read(self, client: str, digest: str) -> bool:
        """Whether the agent was asked to work with this artifact, or is about to be, after a restart."""
        attempt, given = self._engine.state.attempt, self._engine.state.at_work.get(client)
        if given is not None and given.model == digest:
            return True
        if attempt is not None and client in attempt.awaited and self.needs(digest):
            return True
        return self.effects.may_read(client, digest)

    def needs(self, digest: str) -> bool:
        """Whether it is the model that silos are asked to work with now."""
        state = self._engine.state
        attempt = state.attempt
        return digest == (attempt.aggregated.model if attempt and attempt.aggregated else state.model)

    def view(self) -> EngineView:
        """Where the job stands; a database or bucket that is away shows as what the job waits for."""
        view = self._engine.view()
        if secure := self.effects.protocol():
            waiting = f"secure aggregation, {secure}"
            view = replace(
                view, waiting_for=f"{waiting}; {view.waiting_for}" if view.waiting_for else waiting
            )
        trouble = self._trouble or self.effects.trouble
        return replace(view, waiting_for=trouble) if trouble else view

    def next_change(self) -> asyncio.Event:
        """Set at the next change of anything that people can see."""
        return self._changed

    def notify(self) -> None:
        """Something has changed that people can see."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Events that nobody has looked at yet."""
        return self._queue.qsize()

    def where(self) -> dict[str, Any]:
        """The place that log lines of this job carry."""
        attempt = self._engine.state.attempt
        found: dict[str, Any] = {"job": self.row.id}
        if attempt is not None:
            found |= {"round": attempt.round, "attempt": attempt.number, "phase": attempt.phase}
        return found

    async def run(self) -> None:
        """Takes events until the job has ended, beginning with what was outstanding after a restart."""
        belongs_to(self.where)
        if self._engine.state.attempt is not None:
            self.effects.take_up(self._engine.state.attempt.step)
        batch = Batch()
        self._collect(self._engine.outstanding(self._services.clock()), batch)
        await self._finish(batch)
        while not self.final:
            arrivals = [await self._queue.get()]
            while not self._queue.empty():
                arrivals.append(self._queue.get_nowait())
            batch = Batch()
            for arrival in arrivals:
                self._take(arrival, batch)
            await self._finish(batch)
            _answer(arrivals)
        self._close()

    def _take(self, arrival: Arrival, batch: Batch) -> None:
        event = arrival.event
        if arrival.update is not None and isinstance(event, (m.UpdateArrived, m.ClientFailed)):
            arrival.verdict = self._engine.wants(arrival.update.client, event.step)
            if arrival.verdict != "wanted":
                return
            if not self.lost(arrival.update.client, event.step):
                # What is sent again was written down and charged the first time.
                batch.updates.append(arrival.update)
        batch.artifacts.extend(arrival.artifacts)
        batch.worth_writing |= not isinstance(event, _QUIET)
        self._collect(self._engine.handle(event, self._services.clock()), batch)

    def _collect(self, actions: list[m.Action], batch: Batch) -> None:
        """Sorts actions into what the transaction holds and what follows it.

        A `Commit` is answered at once: its record and the state after it become durable together, so
        that a round is committed exactly once.
        """
        for action in actions:
            batch.worth_writing = True
            match action:
                case m.Note():
                    self._add_event(batch, action)
                case m.StatusChanged("running", reason):
                    self._add_event(batch, m.Note("job_running", f"the job is running: {reason}"))
                case m.StatusChanged():
                    # Why a job has ended or is paused the engine has noted itself.
                    batch.effects.append(action)
                case m.Commit(record):
                    batch.records.append(record_to_plain(record))
                    batch.effects.append(action)
                    now = self._services.clock()
                    self._collect(self._engine.handle(m.Committed(record.round), now), batch)
                case _:
                    batch.effects.append(action)

    def _add_event(self, batch: Batch, note: m.Note) -> None:
        self._sequence += 1
        now = self._services.clock()
        where = (note.round, note.attempt, note.client)
        detail = dict(note.detail)
        fault = fault_of(note)
        self._services.observer.noted(note, fault)
        if fault is not None:
            detail["fault"] = fault.plain()
            self._services.alerts.tell(fault, note.message, now, self.row.id, self.row.name)
        batch.events.append(EventRow(self._sequence, now, note.kind, note.message, *where, detail))
        extra = dict(zip(("round", "attempt", "site"), where, strict=True))
        log.info(
            "%s: %s", self.row.name, note.message, extra={"job": self.row.id, "kind": note.kind, **extra}
        )

    async def _finish(self, batch: Batch) -> None:
        """Durable, then visible."""
        began = time.monotonic()
        if batch.worth_writing:
            await self._persist(batch)
        attempt = self._engine.state.attempt
        step = attempt.step if attempt else None
        self._services.observer.moved(self.row.id, step, batch.records, time.monotonic() - began)
        for action in batch.effects:
            self.effects.perform(action)
        failpoint("transition_done", *self._place(batch))
        self.notify()

    def _place(self, batch: Batch) -> tuple[int, str]:
        """Where this batch leads, for faults that are injected: the commit of a round, or a phase."""
        if batch.records:
            return batch.records[-1]["round"], m.COMMIT
        attempt = self._engine.state.attempt
        return (attempt.round, attempt.phase) if attempt else (0, "")

    async def _persist(self, batch: Batch) -> None:
        state, now = self._engine.state, self._services.clock()
        place = self._place(batch)
        failpoint("transition_due", *place)
        step = Transition(
            job=self.row.id,
            version=self.row.version + 1,
            writer=self._services.writer,
            time=now,
            snapshot={**self.row.snapshot, "engine": self._engine.snapshot()},
            status=state.status,
            reason=state.reason,
            events=batch.events,
            updates=batch.updates,
            artifacts=batch.artifacts,
            records=batch.records,
            released=_released(batch.effects),
            charges=self.effects.charges(batch.updates),
        )
        await self._until_written(step, place)
        failpoint("transition_stored", *place)
        row = replace(self.row, version=step.version, status=step.status, reason=step.reason, updated=now)
        for record in batch.records:
            row = replace(
                row, model=record["model"], optimizer=record["optimizer"], rounds_done=record["round"]
            )
        self.row = row

    async def _until_written(self, step: Transition, place: tuple[int, str]) -> None:
        def write(connection: Connection) -> None:
            apply(connection, step)
            failpoint("transition_open", *place)

        pause = FIRST_PAUSE
        while True:
            try:
                await self._services.database.write(write)
            except LeaseLost:
                raise
            except StorageError as error:
                if not self._trouble:
                    told = (str(error), step.time, self.row.id, self.row.name)
                    self._services.alerts.tell(storage_fault(str(error)), *told)
                self._trouble = f"the job's state cannot be stored: {error}; trying again"
                log.error("%s: %s", self.row.name, self._trouble, extra={"job": self.row.id})
                self.notify()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._trouble = ""
                return

    def _close(self) -> None:
        """The job is over: whoever still waits, or comes later, is told that it came too late."""
        self._over = True
        rest = []
        while not self._queue.empty():
            rest.append(self._queue.get_nowait())
        for arrival in rest:
            arrival.verdict = "stale"
        _answer(rest)
        self.effects.close()
        self.notify()


def _released(effects: list[m.Action]) -> list[tuple[int, int]]:
    """(round, attempt) of new models that leave the coordinator before their round is committed."""
    steps = {action.step for action in effects if isinstance(action, m.Instruct)}
    return [(step.round, step.attempt) for step in steps if step.phase == m.EVALUATE]


def _answer(arrivals: list[Arrival]) -> None:
    for arrival in arrivals:
        if arrival.done is not None and not arrival.done.done():
            arrival.done.set_result(arrival.verdict)
