"""Which artifacts the database mentions, and which nothing needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables
from roundtable.server.store.rows import ArtifactRow

SECRET_KINDS = ("update", "optimizer")
LIVE = ("waiting", "running", "paused")


def note_artifact(connection: Connection, artifact: ArtifactRow) -> None:
    """Mentions an artifact, once."""
    known = sa.select(sa.literal(1)).where(tables.artifacts.c.digest == artifact.digest)
    if connection.execute(known).first() is None:
        connection.execute(sa.insert(tables.artifacts).values(asdict(artifact)))


def kind_of(connection: Connection, digest: str) -> str | None:
    """What an artifact is; None for one that the database does not mention."""
    query = sa.select(tables.artifacts.c.kind).where(tables.artifacts.c.digest == digest)
    return connection.execute(query).scalar()


def spent_updates(connection: Connection, job: str, round_number: int) -> list[str]:
    """Digests of updates of this job up to a committed round."""
    query = sa.select(tables.updates.c.digest).where(
        tables.updates.c.job == job, tables.updates.c.round <= round_number
    )
    known = sa.select(tables.artifacts.c.digest)
    return list(connection.execute(query.where(tables.updates.c.digest.in_(known)).distinct()).scalars())


def old_models(connection: Connection, job: str, keep: int) -> list[str]:
    """Models and optimizer states of this job's rounds before the newest `keep`."""
    table = tables.rounds.c
    newest = connection.execute(sa.select(sa.func.max(table.round)).where(table.job == job)).scalar() or 0
    known = sa.select(tables.artifacts.c.digest)
    found: set[str] = set()
    for column, kept in ((table.model, keep), (table.optimizer, 1)):
        query = sa.select(column).where(table.job == job, table.round <= newest - kept, column.in_(known))
        found.update(connection.execute(query).scalars())
    return sorted(found)


def forget_unused(connection: Connection, digests: Sequence[str], keep: int) -> list[str]:
    """Deletes the rows of those that no job needs, and returns them; the files may then go.

    Needed are each job's initial and newest model and optimizer state, its newest `keep` rounds, and the
    updates of rounds that are not committed.
    """
    gone = [digest for digest in digests if not _needed(connection, digest, keep)]
    if gone:
        connection.execute(sa.delete(tables.artifacts).where(tables.artifacts.c.digest.in_(gone)))
    return gone


def _needed(connection: Connection, digest: str, keep: int) -> bool:
    jobs, rounds, updates = tables.jobs.c, tables.rounds.c, tables.updates.c
    current = sa.select(jobs.id).where(
        sa.or_(jobs.initial_model == digest, jobs.model == digest, jobs.optimizer == digest)
    )
    recent = (
        sa.select(rounds.job)
        .join(tables.jobs, jobs.id == rounds.job)
        .where(rounds.model == digest, rounds.round > jobs.rounds_done - keep)
    )
    waiting = (
        sa.select(updates.job)
        .join(tables.jobs, jobs.id == updates.job)
        .where(updates.digest == digest, updates.round > jobs.rounds_done, jobs.status.in_(LIVE))
    )
    return any(connection.execute(query.limit(1)).first() for query in (current, recent, waiting))
