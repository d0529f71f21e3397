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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig
from roundtable.core.errors import SiteFailure, StorageError
from roundtable.core.failpoints import failpoint
from roundtable.core.foreign_text import printable
from roundtable.core.layout import Layout
from roundtable.core.observability.logs import belongs_to
from roundtable.core.observability.released import Told
from roundtable.engine import EngineView, RoundEngine
from roundtable.engine import messages as m
from roundtable.engine.state import chosen_chain
from roundtable.server.jobs.actions import JobActions, JobParts, PendingTransition
from roundtable.server.jobs.job_inbox import Arrival, EventTail, Verdict, client_of
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.operations.incidents import incident_of
from roundtable.server.operations.publication import Publication
from roundtable.server.queue.contenders import contender_of
from roundtable.server.queue.pace import Pace
from roundtable.server.queue.standing import Contender, Standing
from roundtable.server.store import FINAL, EventRow, JobRow, Transition
from roundtable.server.store.database import LeaseLost
from roundtable.server.store.jobs import apply

log = logging.getLogger("roundtable.server.jobs.runner")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
SHORT_SNAPSHOT, GATHERING, LONGEST_GATHERING = 0.005, 4.0, 1.0
"""A snapshot that takes longer (in seconds) is followed by so many times as long in which events gather, so
that a cohort of thousands is not written out whole for each of its updates."""
_STATE = "the job's state cannot be stored"
# Lost with a crash, these are said again: evaluations are asked for once more.
_QUIET = (m.WorkStarted, m.ClientJoined, m.ClientLeft, m.Evaluated)


class _Turn(NamedTuple):
    round: int
    status: str
    queued: bool
    starved: bool


class JobRunner:
    """Drives one job's engine until the job ends; `inbox`, `instructions`, `collection` and `troubles` are
    its parts'.

    `round_began` is when the round that is under way began, over all its attempts, as far as this process
    knows: after a restart, when the attempt began. `standing` is what the queue of jobs has said of it last;
    `when_moved` is called when that may change. `durations` are the seconds of the rounds so far.
    """

    def __init__(
        self,
        row: JobRow,
        job: JobConfig,
        layout: Layout,
        engine: RoundEngine,
        parts: JobParts,
        actions: JobActions,
        services: JobServices,
        sequence: int,
        durations: Iterable[float] = (),
    ) -> None:
        self.row = row
        self.job = job
        self.layout = layout
        self.inbox = parts.inbox
        self.instructions = parts.instructions
        self.collection = parts.collection
        self._account = parts.account
        self.troubles = parts.troubles
        self._actions = actions
        self._engine = engine
        self._services = services
        self.sequence = sequence
        self.told = EventTail(sequence)
        self._publication = Publication(job.privacy)
        self._snapshot_seconds = 0.0
        self._stored: dict[str, Any] = {}
        self._handled = "its beginning"
        self._culprit: tuple[str, m.Step] | None = None
        self.standing: Standing | None = None
        self.when_moved: Callable[[], None] = lambda: None
        self._pace = Pace(durations)
        self._turn = self._present_turn()
        attempt = engine.state.attempt
        self.round_began = attempt.started if attempt else services.clock()

    @property
    def tells_cohorts(self) -> bool:
        """Whether anybody may know who takes part in this job's rounds."""
        return self._publication.tells_cohorts

    @property
    def final(self) -> bool:
        """Whether the job has ended for good, durably."""
        return self.row.status in FINAL

    @property
    def waits(self) -> bool:
        """Whether it waits for its turn."""
        return self._engine.queued

    @property
    def after(self) -> tuple[str, ...]:
        """The identifiers of the jobs that it comes after; none once it has begun."""
        return () if self._engine.state.started else tuple(self.row.snapshot.get("after", ()))

    def contender(self, blocked: str, freed: float) -> Contender | None:
        """The job as the queue sees it, `blocked` until `freed`; None where it is paused or over."""
        elapsed = self._services.clock() - self.round_began
        return contender_of(self.row, self.job, self._engine, blocked, freed, self._pace.seconds, elapsed)

    def has_asked(self, client: str) -> bool:
        """Whether a round of the job has ever drawn this client."""
        record = self._engine.state.clients.get(client)
        return record is not None and record.selected > 0

    def give_up_on(self, step: m.Step, failure: SiteFailure) -> None:
        """Tells engine and protocol that a silo will not answer."""
        self.inbox.post(m.ClientFailed(step, failure))
        self.collection.failed(failure)

    def stop(self) -> None:
        """Drops what is under way; the job can be taken up again."""
        self._actions.stop()

    def wants(self, client: str, step: m.Step) -> Verdict:
        """The verdict on an upload, before a byte of it is accepted."""
        return self._engine.wants(client, step)

    async def receive(self, client: str, step: m.Step, digest: str) -> None:
        """Pays for an upload that is wanted, before a byte of it is accepted."""
        await self._account.receive(client, step, digest)

    def lost(self, client: str, step: m.Step) -> str:
        """The digest of the update that was accepted for this step, is damaged and wanted again; or ""."""
        update = self._engine.lost(client, step)
        return update.digest if update is not None else ""

    def encoding_of(self, client: str) -> str:
        """The chain in which the client's update is expected."""
        return chosen_chain(self._engine.state, client) or self.job.transfer.up

    def refusal(self, client: str, step: m.Step) -> str:
        """The reason why an update for this step is stale."""
        return self._engine.refusal(client, step)

    def may_read(self, client: str, digest: str) -> bool:
        """Whether the agent was asked to work with this artifact, or is about to be, after a restart."""
        attempt, given = self._engine.state.attempt, self._engine.state.at_work.get(client)
        if given is not None and given.model == digest:
            return True
        if attempt is not None and client in attempt.awaited and self.needs(digest):
            return True
        return self.instructions.may_read(client, digest)

    def needs(self, digest: str) -> bool:
        """Whether it is the model that silos are asked to work with now."""
        state = self._engine.state
        attempt = state.attempt
        return digest == (attempt.aggregated.model if attempt and attempt.aggregated else state.model)

    def view(self, *, with_clients: bool = True) -> Told[EngineView]:
        """The job's current state; a database or bucket that is away shows as what the job waits for."""

        def with_trouble(view: EngineView) -> EngineView:
            line = self.standing.reason if self.standing and self.waits else ""
            waiting = "; ".join(filter(None, (self.collection.progress(), view.waiting_for, line)))
            return replace(view, waiting_for=str(self.troubles) or waiting)

        return self._publication.view(self._engine.view(with_clients=with_clients)).become(with_trouble)

    def fault(self, error: BaseException) -> str:
        """What an unexpected error of this driver is, in words: where, at whose event, and what."""
        attempt = self._engine.state.attempt
        place = f" in round {attempt.round}, attempt {attempt.number}" if attempt else ""
        what = printable(f"{type(error).__name__}: {error}", 500)
        return self._publication.fault(place, self._handled, what)

    @property
    def culprit(self) -> tuple[str, m.Step] | None:
        """The silo at whose event, of which step, the driver has failed; None if that cannot be told."""
        return self._culprit

    def where(self) -> dict[str, Any]:
        """The fields that log lines of this job carry."""
        attempt = self._engine.state.attempt
        place: dict[str, Any] = {"job": self.row.id}
        if attempt is not None:
            place |= {"round": attempt.round, "attempt": attempt.number, "phase": attempt.phase}
        return place

    async def run(self) -> None:
        """Takes events until the job has ended, beginning with what was outstanding after a restart."""
        belongs_to(self.where)
        if (attempt := self._engine.state.attempt) and (attempt.awaited or attempt.phase != m.TRAIN):
            self.collection.take_up(attempt.step)
        batch = PendingTransition()
        self._collect(self._engine.outstanding(self._services.clock()), batch)
        await self._finish(batch)
        while not self.final:
            arrivals = await self.inbox.arrivals()
            try:
                await self._handle(arrivals)
            except Exception:
                self.inbox.abandon(arrivals)
                raise
            self.inbox.answer(arrivals)
            if self._snapshot_seconds > SHORT_SNAPSHOT:
                # Of thousands of clients: what comes meanwhile is written together.
                await asyncio.sleep(min(LONGEST_GATHERING, self._snapshot_seconds * GATHERING))
        self.inbox.close()
        self._actions.close()
        self.inbox.notify()

    async def _handle(self, arrivals: list[Arrival]) -> None:
        batch = PendingTransition()
        for arrival in arrivals:
            self._take(arrival, batch)
        if len(arrivals) > 1:
            # Which of them cannot be made durable is not known.
            self._culprit = None
        await self._finish(batch)

    def _take(self, arrival: Arrival, batch: PendingTransition) -> None:
        event = arrival.event
        client, step = client_of(event), getattr(event, "step", None)
        self._handled = f"{type(event).__name__} of {client}" if client else type(event).__name__
        self._culprit = (client, step) if client and step else None
        if arrival.updates and isinstance(event, (m.UpdateArrived, m.SumArrived, m.ClientFailed)):
            for update in arrival.updates:
                arrival.verdict = self._engine.wants(update.client, event.step)
                if arrival.verdict != "wanted":
                    return
            # What is sent again was written down the first time.
            batch.updates += [each for each in arrival.updates if not self.lost(each.client, event.step)]
        batch.hold(arrival)
        batch.worth_writing |= not isinstance(event, _QUIET)
        self._collect(self._engine.handle(event, self._services.clock()), batch)

    def _collect(self, actions: list[m.Action], batch: PendingTransition) -> None:
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
                    batch.actions.append(action)
                case m.Commit(record):
                    self._pace.add(record.ended - record.started)
                    batch.records.append(self._publication.plain(record))
                    batch.actions.append(action)
                    now = self._services.clock()
                    self._collect(self._engine.handle(m.Committed(record.round), now), batch)
                case _:
                    batch.actions.append(action)

    def _add_event(self, batch: PendingTransition, note: m.Note) -> None:
        """Logs an event here, and adds what everybody may know of it to the job's history."""
        place = {"job": self.row.id, "round": note.round, "attempt": note.attempt, "site": note.client}
        shown = self._publication.event(note)
        told = shown.value.message if shown is not None else None
        log.info("%s: %s", self.row.name, note.message, extra={"kind": note.kind, "told": told, **place})
        if shown is None:
            return
        self.sequence += 1
        now = self._services.clock()
        incident = incident_of(shown)
        self._services.observer.noted(shown, incident)
        if incident is not None:
            self._services.alerts.tell(incident, shown.value.message, now, self.row.id, self.row.name)
        more = {} if incident is None else {"incident": incident.plain()}
        batch.events.append(shown.become(partial(_event_row, self.sequence, now, more)))

    async def _finish(self, batch: PendingTransition) -> None:
        """Makes a batch durable, then performs its actions."""
        began = time.monotonic()
        if batch.worth_writing:
            await self._persist(batch)
        attempt = self._engine.state.attempt
        step = attempt.step if attempt else None
        self._services.observer.moved(self.row.id, step, batch.records, time.monotonic() - began)
        if (turn := self._present_turn()) != self._turn:
            now = self._services.clock()
            if (turn.round, turn.status) != (self._turn.round, self._turn.status):
                self.round_began = now
            self._turn = turn
            self.when_moved()
        for action in batch.actions:
            self._actions.perform(action)
        failpoint("transition_done", *self._place(batch))
        self.inbox.notify()

    def _present_turn(self) -> _Turn:
        """With a new round or status the time that the job gives to a round begins anew."""
        engine = self._engine
        attempt = engine.state.attempt
        return _Turn(attempt.round if attempt else 0, engine.state.status, engine.queued, engine.starved)

    def _place(self, batch: PendingTransition) -> tuple[int, str]:
        """(round, phase) that this batch leads to, for failpoints; a commit counts as a phase."""
        if batch.records:
            return batch.records[-1].value["round"], m.COMMIT
        attempt = self._engine.state.attempt
        return (attempt.round, attempt.phase) if attempt else (0, "")

    async def _persist(self, batch: PendingTransition) -> None:
        state, now = self._engine.state, self._services.clock()
        place = self._place(batch)
        row = self.row.after((told.value for told in batch.records), state.summary.best)
        failpoint("transition_due", *place)
        began = time.monotonic()
        engine = self._engine.snapshot()
        clients = engine.pop("clients")
        changed = {name: each for name, each in clients.items() if self._stored.get(name) != each}
        self._snapshot_seconds = time.monotonic() - began
        step = Transition(
            job=self.row.id,
            version=self.row.version + 1,
            writer=self._services.writer,
            time=now,
            updated=now if batch.shows or self.tells_cohorts else row.updated,
            snapshot={**self.row.snapshot, "engine": engine},
            clients=changed,
            status=state.status,
            reason=state.reason,
            events=batch.events,
            updates=batch.updates,
            sums=batch.sums,
            artifacts=batch.artifacts,
            records=batch.records,
            learnt=self._services.links.learnt(batch.updates, self.job.privacy),
            released=batch.released,
            best=(row.best_model, row.best_round, row.best_value) if row.best_model else None,
        )
        await self._until_written(step, place)
        self._stored = clients
        self.told.add(event.value for event in batch.events)
        failpoint("transition_stored", *place)
        now = step.updated
        self.row = replace(row, version=step.version, status=step.status, reason=step.reason, updated=now)

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
                self.troubles.note(_STATE, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self.troubles.over(_STATE)
                return


def _event_row(sequence: int, now: float, more: Mapping[str, Any], note: m.Note) -> EventRow:
    detail = {**note.detail, **more}
    return EventRow(sequence, now, note.kind, note.message, note.round, note.attempt, note.client, detail)
