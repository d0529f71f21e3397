"""What becomes of jobs that are over: deleted by somebody, or with fewer and fewer rows as time goes by."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.evidence.audit_log import entry
from roundtable.core.identity.signing import job_digest
from roundtable.server.store import tables
from roundtable.server.store.artifacts import Keep, forget_unused, mentioned
from roundtable.server.store.audit import COORDINATOR, append
from roundtable.server.store.jobs import DELETED, FINAL, stored_job

_AT_ONCE = 500
_OF_A_JOB = (
    tables.events,
    tables.updates,
    tables.relayed_sums,
    tables.rounds,
    tables.job_lines,
    tables.job_setups,
    tables.job_clients,
)


def delete_job(connection: Connection, job: str, who: str, now: float, keep: Keep) -> list[str] | None:
    """Forgets all of a job that is over but its row, its configuration and its charges.

    Gives the artifacts that no other job needs, whose files may go; None for a job that is not over, or was
    deleted already. The audit log is told in the same transaction.
    """
    row = stored_job(connection, job)
    if row.status not in FINAL or row.status == DELETED:
        return None
    digests = artifacts_of(connection, job)
    for table in _OF_A_JOB:
        connection.execute(sa.delete(table).where(table.c.job == job))
    gone = {"initial_model": "", "model": "", "optimizer": "", "best_model": "", "snapshot": "{}"}
    values = {**gone, "status": DELETED, "reason": f"deleted by {who}", "updated": now}
    connection.execute(sa.update(tables.jobs).where(tables.jobs.c.id == job).values(values))
    forgotten = forget_unused(connection, digests, keep)
    detail = {
        "name": row.name,
        "status": row.status,
        "rounds": row.rounds_done,
        "config": job_digest(row.config),
        "model": row.model,
        "artifacts": len(forgotten),
    }
    append(connection, entry(now, who, "job_deleted", job, detail))
    return forgotten


def artifacts_of(connection: Connection, job: str) -> list[str]:
    """Every artifact that a job has had and that the database still mentions."""
    rounds, updates, jobs = tables.rounds.c, tables.updates.c, tables.jobs.c
    had = sa.union(
        *(sa.select(column).where(rounds.job == job) for column in (rounds.model, rounds.optimizer)),
        *(sa.select(table.digest).where(table.job == job) for table in (updates, tables.relayed_sums.c)),
        *(
            sa.select(column).where(jobs.id == job)
            for column in (jobs.initial_model, jobs.model, jobs.optimizer, jobs.best_model)
        ),
    )
    digests = sorted(set(connection.execute(had).scalars()) - {""})
    pages = (digests[place : place + _AT_ONCE] for place in range(0, len(digests), _AT_ONCE))
    return sorted({digest for page in pages for digest in mentioned(connection, page)})


def retire_artifacts(connection: Connection, keep: Keep, now: float) -> list[str]:
    """Forgets the artifacts of jobs that were over before `keep.ended_before`; gives their digests.

    Who still needs one of them keeps it. The audit log is told of each job.
    """
    table, forgotten = tables.jobs.c, list[str]()
    over = sa.select(table.id).where(table.status.in_(FINAL), table.updated < keep.ended_before)
    for job in connection.execute(over.order_by(table.id)).scalars().all():
        gone = forget_unused(connection, artifacts_of(connection, job), keep)
        if gone:
            append(connection, entry(now, COORDINATOR, "artifacts_retired", job, {"artifacts": len(gone)}))
            forgotten += gone
    return forgotten


def retire_events(connection: Connection, before: float, now: float) -> int:
    """Deletes what jobs that are over were told of before a time; returns how many events."""
    table = tables.events.c
    over = sa.select(tables.jobs.c.id).where(tables.jobs.c.status.in_(FINAL))
    old = sa.and_(table.time < before, table.job.in_(over))
    jobs = connection.execute(sa.select(table.job, sa.func.count()).where(old).group_by(table.job)).all()
    if not jobs:
        return 0
    connection.execute(sa.delete(tables.events).where(old))
    for job, count in sorted(tuple(row) for row in jobs):
        append(connection, entry(now, COORDINATOR, "events_retired", job, {"events": count}))
    return sum(count for _, count in jobs)
