"""Jobs that are repeated: which runs are over and not followed yet."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables
from roundtable.server.store.rows import JobRow

FOLLOWED = ("finished", "failed")
"""How a run has ended that another follows; one that was cancelled is the last."""


def runs_to_follow(connection: Connection) -> list[JobRow]:
    """Those that are over, and the next was not made, oldest first."""
    table = tables.jobs.c
    query = sa.select(tables.jobs).where(table.repeats == 1, table.status.in_(FOLLOWED))
    return [JobRow.of(row) for row in connection.execute(query.order_by(table.updated))]


def take_mark(connection: Connection, job: str) -> bool:
    """Takes away the mark that a run is to follow; whether it was there. Once, whoever asks."""
    table = tables.jobs.c
    change = sa.update(tables.jobs).where(table.id == job, table.repeats == 1).values(repeats=0)
    return connection.execute(change).rowcount == 1
