"""The log of each job: the coordinator's own lines and those of silos, the newest of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.evidence.audit_log import entry
from roundtable.core.observability.log_levels import LEVELS
from roundtable.server.store import tables
from roundtable.server.store.audit import COORDINATOR, append
from roundtable.server.store.jobs import DELETED

MOST_KEPT = 10_000
"""Lines of a job that are kept of one silo, and of the coordinator: the newest."""
_AT_ONCE = 500


@dataclass(frozen=True)
class FreshLine:
    """A line that is to be stored; `silo` is empty for the coordinator, `number` tells it from all others."""

    job: str
    silo: str
    number: int
    time: float
    level: str
    round: int
    attempt: int
    phase: str
    kind: str
    text: str


@dataclass(frozen=True)
class LineRow:
    """A line as it is read; `sequence` is its place in the job's log."""

    sequence: int
    time: float
    silo: str
    level: str
    round: int
    attempt: int
    phase: str
    kind: str
    text: str


@dataclass(frozen=True)
class LineFilter:
    """Which lines of a log are wanted: of one silo, of a level and above, of one round; "" and 0 for all."""

    silo: str = ""
    level: str = ""
    round: int = 0


def insert_lines(connection: Connection, lines: Sequence[FreshLine], now: float) -> int:
    """Adds lines to their jobs' logs, but of unknown and deleted jobs; returns how many were new."""
    added = 0
    for (job, silo), group in groupby(
        sorted(lines, key=lambda line: (line.job, line.silo, line.number)), lambda line: (line.job, line.silo)
    ):
        added += _insert(connection, job, silo, {line.number: line for line in group}, now)
    return added


def _insert(connection: Connection, job: str, silo: str, lines: dict[int, FreshLine], now: float) -> int:
    table, jobs = tables.job_lines.c, tables.jobs.c
    if connection.execute(sa.select(jobs.status).where(jobs.id == job)).scalar() in (None, DELETED):
        return 0
    own = sa.and_(table.job == job, table.silo == silo)
    numbers = sorted(lines)
    for place in range(0, len(numbers), _AT_ONCE):
        known = sa.select(table.number).where(own, table.number.in_(numbers[place : place + _AT_ONCE]))
        for number in connection.execute(known).scalars():
            del lines[number]
    if not lines:
        return 0
    last = connection.execute(sa.select(sa.func.max(table.sequence)).where(table.job == job)).scalar() or 0
    rows = [
        {**asdict(line), "sequence": last + place, "received": now}
        for place, line in enumerate(lines.values(), 1)
    ]
    connection.execute(sa.insert(tables.job_lines), rows)
    newest = sa.select(table.number).where(own).order_by(table.number.desc()).limit(1).offset(MOST_KEPT)
    if (too_old := connection.execute(newest).scalar()) is not None:
        connection.execute(sa.delete(tables.job_lines).where(own, table.number <= too_old))
    return len(rows)


def lines_from(
    connection: Connection, job: str, sequence: int, wanted: LineFilter, limit: int
) -> list[LineRow]:
    """At most `limit` lines from this place on, in their order."""
    table = tables.job_lines.c
    query = sa.select(*(table[name] for name in LineRow.__dataclass_fields__))
    query = query.where(table.job == job, table.sequence >= sequence)
    if wanted.silo:
        query = query.where(table.silo == wanted.silo)
    if wanted.level:
        query = query.where(table.level.in_(LEVELS[LEVELS.index(wanted.level) :]))
    if wanted.round:
        query = query.where(table.round == wanted.round)
    rows = connection.execute(query.order_by(table.sequence).limit(limit))
    return [LineRow(**row._mapping) for row in rows]


def retire_lines(connection: Connection, before: float, now: float) -> int:
    """Deletes lines that came before a time, whatever time they state; returns how many.

    The audit log is told of each job.
    """
    table = tables.job_lines.c
    counts = sa.select(table.job, sa.func.count()).where(table.received < before).group_by(table.job)
    jobs = connection.execute(counts).all()
    if jobs:
        connection.execute(sa.delete(tables.job_lines).where(table.received < before))
    for job, count in sorted(tuple(row) for row in jobs):
        append(connection, entry(now, COORDINATOR, "lines_retired", job, {"lines": count}))
    return sum(count for _, count in jobs)
