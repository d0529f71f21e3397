"""Jobs, their history and their rounds: the queries, each a function of a connection."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.errors import ConfigError
from roundtable.core.observability.released import Told
from roundtable.server.store import tables
from roundtable.server.store.agent_rows import learn
from roundtable.server.store.artifacts import note_artifact
from roundtable.server.store.audit import append_rounds
from roundtable.server.store.database import LeaseLost
from roundtable.server.store.history_rows import insert_round
from roundtable.server.store.job_silo_rows import store_clients
from roundtable.server.store.ledger import settle
from roundtable.server.store.rows import (
    ArtifactRow,
    EventRow,
    JobRow,
    Learnt,
    RelayedSumRow,
    UpdateRow,
    to_json,
)
from roundtable.server.store.trust_rows import Party

DELETED = "deleted"
"""A job of which the row is left, so that charges and silos that know it still have one."""
FINAL = ("finished", "cancelled", "failed", DELETED)
LONGEST_NAME = 200
MOST_ENDED = 100
SHOWN = 5
"""Jobs that an answer lists where more than one could be meant."""
INCIDENT_KINDS = (
    "client_failed",
    "client_troubled",
    "client_offline",
    "update_excluded",
    "attempt_failed",
    "round_closed",
    "round_skipped",
    "job_paused",
    "job_failed",
    "series_over",
)


@dataclass
class Transition:
    """All that one step of a job makes durable, in one transaction.

    `updated` is when the job has last changed as everybody may know it: not with answers of a secret cohort.
    `records` are committed rounds as JSON objects with at least round, attempt, model, optimizer,
    cohort, contributors, charge and ended; each is written exactly once. `released` names the
    (round, attempt) whose new model is shown to anybody from now on. `best` is (model, round, value) of the
    best model, where the job keeps it; `learnt` is what updates have told of their agents, `clients` what the
    engine remembers of those of whom that has changed.
    """

    job: str
    version: int
    writer: str
    time: float
    updated: float
    snapshot: dict[str, Any]
    status: str
    reason: str
    events: list[Told[EventRow]] = field(default_factory=list)
    updates: list[UpdateRow] = field(default_factory=list)
    sums: list[RelayedSumRow] = field(default_factory=list)
    artifacts: list[ArtifactRow] = field(default_factory=list)
    records: list[Told[dict[str, Any]]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    best: tuple[str, int, float] | None = None
    learnt: Mapping[str, Learnt] = field(default_factory=dict)
    clients: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def insert_job(
    connection: Connection, job: JobRow, artifact: ArtifactRow, events: Sequence[Told[EventRow]]
) -> None:
    """A new job with its initial model; IntegrityError for a request_id that is taken."""
    connection.execute(sa.insert(tables.jobs).values({**asdict(job), "snapshot": to_json(job.snapshot)}))
    note_artifact(connection, artifact)
    insert_events(connection, job.id, events)


def apply(connection: Connection, step: Transition) -> None:
    """Writes the whole transition, from the job's version before it to `version`; once, however often called.

    LeaseLost if somebody else has taken the job further in the meantime.
    """
    records = [told.value for told in step.records]
    values: dict[str, Any] = {
        "snapshot": to_json(step.snapshot),
        "status": step.status,
        "reason": step.reason,
        "version": step.version,
        "writer": step.writer,
        "updated": step.updated,
    }
    for record in records:
        values |= {"model": record["model"], "optimizer": record["optimizer"], "rounds_done": record["round"]}
    if step.best is not None:
        values |= dict(zip(("best_model", "best_round", "best_value"), step.best, strict=True))
    before = {"job": step.job, "before": step.version - 1}
    if connection.execute(_CHANGE, {**before, **values}).rowcount == 0:
        _check_already_made(connection, step)
        return
    for artifact in step.artifacts:
        note_artifact(connection, artifact)
    for record in records:
        insert_round(connection, step.job, record)
    _insert_updates(connection, step.job, step.updates)
    if step.sums:
        connection.execute(
            sa.insert(tables.relayed_sums), [{"job": step.job, **asdict(each)} for each in step.sums]
        )
    learn(connection, step.learnt)
    store_clients(connection, step.job, step.clients)
    insert_events(connection, step.job, step.events)
    charged = [(r["round"], r["attempt"]) for r in records if r["charge"]]
    settle(connection, step.job, [*step.released, *charged], over=step.status in FINAL)
    append_rounds(connection, step.job, step.time, records, [told.value for told in step.events])


def _check_already_made(connection: Connection, step: Transition) -> None:
    """Raises LeaseLost unless this very transition is already stored: its first answer may have been lost."""
    table = tables.jobs.c
    query = sa.select(table.version, table.writer).where(table.id == step.job)
    stored = connection.execute(query).first()
    if stored is None or (stored.version, stored.writer) != (step.version, step.writer):
        raise LeaseLost(
            f"job {step.job} was taken further by another coordinator; this one must not go on with it"
        )


def mark(connection: Connection, job: str, status: str, reason: str, now: float) -> None:
    """Stores status and reason of a job whose engine could not go on; its snapshot stays as it is."""
    values = {"status": status, "reason": reason, "updated": now}
    connection.execute(sa.update(tables.jobs).where(tables.jobs.c.id == job).values(values))


def jobs_in_order(connection: Connection) -> list[JobRow]:
    """Every job that was not deleted, newest first."""
    order = (tables.jobs.c.submitted.desc(), tables.jobs.c.id)
    query = sa.select(tables.jobs).where(tables.jobs.c.status != DELETED).order_by(*order)
    return [JobRow.of(row) for row in connection.execute(query)]


def listed_jobs(connection: Connection) -> list[JobRow]:
    """The same without their snapshots, which may be large, and which no list needs."""
    order = (tables.jobs.c.submitted.desc(), tables.jobs.c.id)
    columns = [column for column in tables.jobs.c if column.name != "snapshot"]
    query = sa.select(*columns).where(tables.jobs.c.status != DELETED).order_by(*order)
    return [JobRow(**row._mapping, snapshot={}) for row in connection.execute(query)]


def statuses(connection: Connection, jobs: Collection[str]) -> dict[str, tuple[str, float]]:
    """How these jobs stand, and since when, by identifier; one that never was is DELETED."""
    table = tables.jobs.c
    found = connection.execute(sa.select(table.id, table.status, table.updated).where(table.id.in_(jobs)))
    return dict.fromkeys(jobs, (DELETED, 0.0)) | {row.id: (row.status, row.updated) for row in found}


def unfinished_jobs(connection: Connection) -> list[JobRow]:
    """Those that a restarted coordinator must take up again, oldest first."""
    query = sa.select(tables.jobs).where(tables.jobs.c.status.not_in(FINAL)).order_by(tables.jobs.c.submitted)
    return [JobRow.of(row) for row in connection.execute(query)]


@dataclass(frozen=True)
class EndedJob:
    """A job that is over since `updated`; `config` as it is stored."""

    id: str
    status: str
    reason: str
    config: str
    updated: float


def jobs_ended(connection: Connection, since: float) -> list[EndedJob]:
    """The newest of those that have ended since then."""
    table = tables.jobs.c
    query = sa.select(table.id, table.status, table.reason, table.config, table.updated)
    newest = query.where(table.status.in_(FINAL), table.updated > since).order_by(table.updated.desc())
    return [EndedJob(**row._mapping) for row in connection.execute(newest.limit(MOST_ENDED))]


@dataclass(frozen=True)
class JobPosition:
    """How far a job has come: its status, its rounds, and how many are committed."""

    status: str
    rounds: int
    done: int


def positions_of(connection: Connection, jobs: Collection[str]) -> dict[str, JobPosition]:
    """Identifier → position of those of these jobs that there are, in one query."""
    table = tables.jobs.c
    query = sa.select(table.id, table.status, table.rounds, table.rounds_done).where(table.id.in_(jobs))
    return {
        row.id: JobPosition(status=row.status, rounds=row.rounds, done=row.rounds_done)
        for row in connection.execute(query)
    }


class UnknownJob(ConfigError):
    """No job is meant, or more than one."""


def job_of_request(connection: Connection, request_id: str) -> JobRow | None:
    """The job that this request has made, if any."""
    row = connection.execute(sa.select(tables.jobs).where(tables.jobs.c.request_id == request_id)).first()
    return JobRow.of(row) if row else None


def stored_job(connection: Connection, identifier: str) -> JobRow:
    """The job with this identifier; UnknownJob if there is none."""
    row = connection.execute(sa.select(tables.jobs).where(tables.jobs.c.id == identifier)).first()
    if row is None:
        raise UnknownJob(f"there is no job {identifier[:64]!r}")
    return JobRow.of(row)


def find_job(connection: Connection, wanted: str, who: Party, *, own: bool = False) -> JobRow:
    """Finds the one job that a caller means by an identifier, the beginning of one, or a name.

    An identifier is always that job's. Anybody may call a job anything, so a name is first looked for among
    the caller's own jobs, and with `own`, for what changes a job, nowhere else; among those of others it
    counts only where all of them are one submitter's. Of one submitter's jobs of a name those that are not
    over are meant, or else the newest. Raises UnknownJob where none fits or more than one, naming them.
    """
    table = tables.jobs.c
    if not 0 < len(wanted) <= LONGEST_NAME:
        raise UnknownJob(
            f"no job is named by {len(wanted)} characters: give an identifier, its beginning, or a name"
        )
    begun = sa.select(tables.jobs).where(table.id.startswith(wanted, autoescape=True)).limit(SHOWN)
    fitting = {row.id: JobRow.of(row) for row in connection.execute(begun)}
    if wanted in fitting:
        return _there(fitting[wanted])
    gone = [row for row in fitting.values() if row.status == DELETED]
    fitting = {identifier: row for identifier, row in fitting.items() if row.status != DELETED}
    role, name = who
    mine = sa.and_(table.submitter == name, table.submitter_role.in_((role, "")))
    named = _named(connection, wanted, mine)
    others = [] if named else _named(connection, wanted, sa.not_(mine))
    fitting |= {row.id: row for row in (named if own else named or others)}
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        raise UnknownJob(
            f"{wanted[:64]!r} can mean several jobs, {_listed(fitting.values())}: name one of these"
        )
    if others:
        raise UnknownJob(
            f"no job of yours is called {wanted[:64]!r}, and another's is changed by its identifier alone: "
            f"{_listed(others)}"
        )
    for row in gone:
        _there(row)
    raise UnknownJob(f"there is no job {wanted[:64]!r}; `roundtable job list` shows them all")


def _there(row: JobRow) -> JobRow:
    """The job itself; UnknownJob for one that was deleted."""
    if row.status == DELETED:
        raise UnknownJob(
            f"job {row.id} ({row.name}) was {row.reason}; what it has spent of privacy and the audit log stay"
        )
    return row


def _named(connection: Connection, name: str, whose: sa.ColumnElement[bool]) -> list[JobRow]:
    """Jobs, or runs of a series, of this name: of each submitter those not over, or else the newest."""
    table = tables.jobs.c
    of_series = sa.and_(table.run > 0, table.name.startswith(f"{name}#", autoescape=True))
    called = sa.and_(sa.or_(table.name == name, of_series), whose, table.status != DELETED)
    newest = (
        sa.select(sa.func.max(table.submitted)).where(called).group_by(table.submitter, table.submitter_role)
    )
    meant = sa.select(tables.jobs).where(
        called, sa.or_(table.status.not_in(FINAL), table.submitted.in_(newest))
    )
    rows = [JobRow.of(row) for row in connection.execute(meant.order_by(table.submitted.desc(), table.id))]
    busy = {(row.submitter_role, row.submitter) for row in rows if row.status not in FINAL}
    over = [row for row in rows if (row.submitter_role, row.submitter) not in busy]
    return [row for row in rows if row.status not in FINAL] + over


def _listed(rows: Iterable[JobRow]) -> str:
    return ", ".join(f"{row.id} of {row.submitter} ({row.status})" for row in list(rows)[:SHOWN])


def history(connection: Connection, job: str) -> list[str]:
    """The committed rounds' records as JSON, oldest first."""
    query = (
        sa.select(tables.rounds.c.record).where(tables.rounds.c.job == job).order_by(tables.rounds.c.round)
    )
    return list(connection.execute(query).scalars())


def events_from(connection: Connection, job: str, sequence: int, limit: int = 1000) -> list[EventRow]:
    """At most `limit` events from this sequence number onwards."""
    query = (
        sa.select(tables.events)
        .where(tables.events.c.job == job, tables.events.c.sequence >= sequence)
        .order_by(tables.events.c.sequence)
        .limit(limit)
    )
    return [_event(row._mapping) for row in connection.execute(query)]


def newest_incidents(connection: Connection, job: str, limit: int = 20) -> list[EventRow]:
    """The newest events that tell of an incident, oldest first."""
    table = tables.events.c
    query = sa.select(tables.events).where(table.job == job, table.kind.in_(INCIDENT_KINDS))
    rows = connection.execute(query.order_by(table.sequence.desc()).limit(limit)).all()
    events = [_event(row._mapping) for row in reversed(rows)]
    return [event for event in events if "incident" in event.detail]


def last_sequence(connection: Connection, job: str) -> int:
    """Sequence number of the newest event; 0 if there is none."""
    query = sa.select(sa.func.max(tables.events.c.sequence)).where(tables.events.c.job == job)
    return int(connection.execute(query).scalar() or 0)


def receipts(
    connection: Connection, job: str, round_number: int
) -> dict[tuple[int, int, str], tuple[str, str]]:
    """(round, attempt, client) → (receipt, reason) from this round onwards."""
    table = tables.updates.c
    query = sa.select(table.round, table.attempt, table.client, table.receipt, table.reason).where(
        table.job == job, table.round >= round_number
    )
    return {(row[0], row[1], row[2]): (row[3], row[4]) for row in connection.execute(query)}


def receipt_of(
    connection: Connection, job: str, round_number: int, attempt: int, client: str
) -> tuple[str, str, str, int] | None:
    """(receipt, reason, digest, size) of one update, if it was received."""
    table = tables.updates.c
    query = sa.select(table.receipt, table.reason, table.digest, table.size).where(
        table.job == job, table.round == round_number, table.attempt == attempt, table.client == client
    )
    row = connection.execute(query).first()
    return (row[0], row[1], row[2], row[3]) if row else None


def _event(row: Any) -> EventRow:
    values = {name: row[name] for name in row if name != "job"}
    return EventRow(**{**values, "detail": json.loads(values["detail"])})


def insert_events(connection: Connection, job: str, events: Sequence[Told[EventRow]]) -> None:
    """Adds events to a job's history."""
    if events:
        told = [event.value for event in events]
        rows = [{"job": job, **vars(event), "detail": to_json(dict(event.detail))} for event in told]
        connection.execute(_INSERT_EVENTS, rows)


def _insert_updates(connection: Connection, job: str, updates: Sequence[UpdateRow]) -> None:
    if updates:
        rows = [{"job": job, **vars(update), "metrics": to_json(dict(update.metrics))} for update in updates]
        connection.execute(_INSERT_UPDATES, rows)


# Built once: each transition of a job runs them, and building one takes longer than running it.
_CHANGE = sa.update(tables.jobs).where(
    tables.jobs.c.id == sa.bindparam("job"), tables.jobs.c.version == sa.bindparam("before")
)
_INSERT_EVENTS, _INSERT_UPDATES = sa.insert(tables.events), sa.insert(tables.updates)
