"""Who of several coordinators on one database may write: a lease with a fencing token.

On PostgreSQL the lease runs out by the database's own clock unless it is renewed. Each new holder gets a
token greater by one, and every transaction that writes holds a shared lock on the lease's row while it
checks that its token is still the newest: a coordinator that was stopped, cut off or slow can commit
nothing once another has taken its place, however late it wakes. A session that stands still within a
transaction is ended by the database after the time of a lease, and its lock with it.

On SQLite a lock on a file keeps a second coordinator away; the token only counts the starts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.server.store import tables
from roundtable.server.store.database import Database, LeaseLost

# Built once: it comes first in every transaction that writes.
_TOKEN = sa.select(tables.lease.c.token).where(tables.lease.c.id == 1).with_for_update(read=True)


@dataclass(frozen=True)
class Holder:
    """Who holds the lease, under which token, where it listens, and for how many seconds still."""

    name: str
    token: int
    address: str
    left: float


class Lease:
    """One coordinator's hold on a database. All methods block: call them in a thread."""

    def __init__(self, database: Database, holder: str, address: str, seconds: float) -> None:
        self._database = database
        self._holder = holder
        self._address = address
        self.seconds = seconds
        self.token = 0
        self._renewed = 0.0

    @property
    def overdue(self) -> bool:
        """Whether it has not been renewed for so long that another may have it."""
        return time.monotonic() - self._renewed > self.seconds

    def acquire(self) -> bool:
        """Takes the lease if it is free, and fences the database with its token; False if another has it."""
        began = time.monotonic()
        with self._database.transaction() as connection:
            table = tables.lease.c
            now = self._now(connection)
            free = sa.true() if self._database.embedded else table.expires < now
            change = sa.update(tables.lease).where(table.id == 1, free)
            values: dict[str, Any] = {"token": table.token + 1, "expires": now + self.seconds}
            values |= {"holder": self._holder, "address": self._address}
            if connection.execute(change.values(values)).rowcount == 0:
                return False
            self.token = int(connection.execute(sa.select(table.token)).scalar_one())
        self._renewed = began
        self._database.fence = self.check
        return True

    def renew(self) -> None:
        """Extends the lease. LeaseLost if another has it, StorageError if the database is away."""
        began = time.monotonic()
        with self._database.transaction() as connection:
            table = tables.lease.c
            change = sa.update(tables.lease).where(table.id == 1, table.token == self.token)
            expires = self._now(connection) + self.seconds
            if connection.execute(change.values(expires=expires)).rowcount == 0:
                raise self._lost()
        self._renewed = began

    def release(self) -> None:
        """Gives the lease up, so that another can have it at once."""
        try:
            with self._database.transaction() as connection:
                table = tables.lease.c
                change = sa.update(tables.lease).where(table.id == 1, table.token == self.token)
                connection.execute(change.values(expires=0.0))
        except StorageError:
            # It runs out by itself.
            return

    def check(self, connection: Connection) -> None:
        """Within a transaction that writes: LeaseLost unless the lease is, and stays until its end, ours."""
        if connection.execute(_TOKEN).scalar() != self.token:
            raise self._lost()

    def holder(self) -> Holder:
        """Reads who holds the lease now."""
        with self._database.transaction() as connection:
            row = connection.execute(sa.select(tables.lease)).one()
            return Holder(row.holder, row.token, row.address, row.expires - self._now(connection))

    def _now(self, connection: Connection) -> float:
        """The database's clock, which all coordinators share."""
        if self._database.embedded:
            return time.time()
        return float(
            connection.execute(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))).scalar_one()
        )

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            "another coordinator has taken the place of this one, which changes nothing any more"
        )
