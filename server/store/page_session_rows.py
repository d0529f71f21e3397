"""Who has signed in to the coordinator's page: kept as digests of what the browsers hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables


@dataclass(frozen=True)
class PageSessionRow:
    """A session. `digest` is SHA-256 of the browser's secret; `credential` what was shown to sign in."""

    digest: str
    role: str
    name: str
    source: str
    credential: str
    created: float
    used: float
    expires: float


def add_session(connection: Connection, row: PageSessionRow) -> None:
    """Keeps a session, and forgets those that are over."""
    table = tables.page_sessions
    connection.execute(sa.delete(table).where(table.c.expires <= row.created))
    connection.execute(sa.insert(table).values(asdict(row)))


def session(connection: Connection, digest: str) -> PageSessionRow | None:
    """The session whose browser holds the secret of this digest."""
    table = tables.page_sessions
    row = connection.execute(sa.select(table).where(table.c.digest == digest)).first()
    return PageSessionRow(**row._mapping) if row else None


def sessions_of(connection: Connection, role: str, name: str) -> list[PageSessionRow]:
    """All sessions of a party, the oldest first."""
    table = tables.page_sessions
    query = sa.select(table).where(table.c.role == role, table.c.name == name).order_by(table.c.created)
    return [PageSessionRow(**row._mapping) for row in connection.execute(query)]


def use_session(connection: Connection, digest: str, now: float) -> None:
    """Notes that a session was used."""
    table = tables.page_sessions
    connection.execute(sa.update(table).where(table.c.digest == digest).values(used=now))


def end_sessions_of(connection: Connection, role: str, name: str) -> None:
    """Forgets every session of a party."""
    table = tables.page_sessions
    connection.execute(sa.delete(table).where(table.c.role == role, table.c.name == name))


def end_session(connection: Connection, digest: str) -> None:
    """Forgets a session."""
    table = tables.page_sessions
    connection.execute(sa.delete(table).where(table.c.digest == digest))
