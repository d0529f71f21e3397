"""The archived part of the audit log: what may go, what is on record, and the whole log laid end to end.

An archive is an artifact, named by its row here. The row and the deletion of the entries are one transaction:
an archive without a row is a file that nothing mentions, and the entries are still there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.evidence.audit_archive import statement_line, unpack
from roundtable.core.evidence.audit_log import FIRST
from roundtable.server.store import audit, tables
from roundtable.server.store.artifacts import note_artifact
from roundtable.server.store.rows import ArtifactRow

MOST_ENTRIES = 20_000
MOST_CHARACTERS = 64 << 20
"""Of the entries of one archive, unless one stretch between two seals has more."""
_PAGE = 500
Load = Callable[[str], bytes]
"""An artifact by its digest."""


@dataclass(frozen=True)
class ArchiveRow:
    """An archive on record. `document` is its signed statement as JSON, `artifact` its file's digest."""

    first: int
    last: int
    document: str
    artifact: str
    time: float

    @property
    def line(self) -> str:
        """The statement's line."""
        return statement_line(json.loads(self.document))


def archives(connection: Connection) -> list[ArchiveRow]:
    """All archives, in the order of their entries."""
    rows = connection.execute(sa.select(tables.archives).order_by(tables.archives.c.first))
    return [ArchiveRow(*row) for row in rows]


def ripe(connection: Connection, before: float, oldest: float) -> tuple[int, int, str] | None:
    """First and last entry to archive next, and the hash before them; None where nothing is due.

    Of entries from before a time, up to one that is sealed; due once the first is from before `oldest`.
    """
    first, previous = _archived(connection)
    table, seal = tables.audit.c, tables.seals.c
    begins = connection.execute(sa.select(table.time).where(table.sequence == first)).scalar()
    if begins is None or begins >= oldest:
        return None
    young = sa.select(sa.func.min(table.sequence)).where(table.time >= before)
    end = (connection.execute(young).scalar() or audit.end(connection)[0] + 1) - 1
    sealed = sa.and_(seal.sequence >= first, seal.sequence <= end)
    most = sa.and_(sealed, seal.sequence <= _full(connection, first))
    last = connection.execute(sa.select(sa.func.max(seal.sequence)).where(most)).scalar()
    last = last or connection.execute(sa.select(sa.func.min(seal.sequence)).where(sealed)).scalar()
    return (first, last, previous) if last else None


def between(connection: Connection, first: int, last: int) -> Iterator[str]:
    """The lines of these entries and of their seals, as long as they are in the tables."""
    place = first
    while place <= last:
        page, place = audit.lines(connection, place, min(_PAGE, last + 1 - place))
        if not page:
            return
        yield from page


def take_out(connection: Connection, row: ArchiveRow, artifact: ArtifactRow) -> int:
    """Puts an archive on record and deletes its entries; returns how many. StorageError where that was done.

    There must be later entries: the log goes on from its last one.
    """
    if _archived(connection)[0] != row.first:
        raise StorageError(f"entries {row.first} to {row.last} of the audit log are archived already")
    assert audit.end(connection)[0] > row.last
    note_artifact(connection, artifact)
    connection.execute(sa.insert(tables.archives).values(asdict(row)))
    connection.execute(sa.delete(tables.seals).where(tables.seals.c.sequence <= row.last))
    return connection.execute(sa.delete(tables.audit).where(tables.audit.c.sequence <= row.last)).rowcount


def whole_log(connection: Connection, load: Load) -> Iterator[str]:
    """Every line of the log: archives, with their statements, and what is in the tables."""
    rows = archives(connection)
    for row in rows:
        yield from unpack(load(row.artifact))
    yield from between(connection, rows[-1].last + 1 if rows else 1, audit.end(connection)[0])


def _archived(connection: Connection) -> tuple[int, str]:
    """The first entry that is not archived, and the hash of the one before it."""
    rows = archives(connection)
    if not rows:
        return 1, FIRST
    return rows[-1].last + 1, str(json.loads(rows[-1].document)["statement"]["hash"])


def _full(connection: Connection, first: int) -> int:
    """The entry at which an archive that begins here is full."""
    table = tables.audit.c
    query = sa.select(table.sequence, sa.func.length(table.detail)).where(table.sequence >= first)
    total, reached = 0, first
    for sequence, length in connection.execute(query.order_by(table.sequence).limit(MOST_ENTRIES)):
        reached, total = sequence, total + length
        if total > MOST_CHARACTERS:
            break
    return reached
