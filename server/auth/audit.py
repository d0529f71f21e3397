"""The coordinator's audit log: what is written, when it is signed, and refusals without a flood.

What an RPC changes is noted before it is done, by `server/auth/access.py`; what a round or an enrolment
makes durable is noted in the same transaction as itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import islice
from typing import Any, Protocol

from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.evidence.audit_archive import unpack
from roundtable.core.evidence.audit_log import AuditEntry, entry
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.store import Database
from roundtable.server.store import audit as store
from roundtable.server.store.audit_archives import Load, archives

log = logging.getLogger("roundtable.server.auth.audit")

SEAL_SECONDS = 60.0
REFUSALS_AT_ONCE, REFUSALS_A_SECOND = 60.0, 600 / 3600
OWN_AT_ONCE, OWN_A_SECOND = 10.0, 60 / 3600
"""Of one actor at one address: nobody crowds out what others were refused."""
PAGE = 500
LAST = 2**31 - 1


class AccessNotes(Protocol):
    """Where calls that change something, and refusals, are written down."""

    async def note(self, actor: str, action: str, target: str = "", **detail: Any) -> None:
        """Appends an entry; it is durable when this returns."""

    def refused(self, actor: str, action: str, reason: str, source: str) -> None:
        """Remembers a refusal."""


class AuditLog:
    """Writes, signs and reads the log. Without an identity it is chained, but not signed."""

    def __init__(
        self,
        database: Database,
        identity: SiloIdentity | None,
        load: Load,
        clock: Callable[[], float],
    ) -> None:
        """`load` gives an archive by its digest."""
        self._database = database
        self._identity = identity
        self._load = load
        self._clock = clock
        self._waiting: list[AuditEntry] = []
        self._unwritten = 0
        self._all = RateLimit(REFUSALS_A_SECOND, REFUSALS_AT_ONCE, clock)
        self._own = RateLimit(OWN_A_SECOND, OWN_AT_ONCE, clock)
        self.refusals = 0
        self.sealed = (0, "")
        """The last entry that is signed, and its hash: what receipts name."""

    async def begin(self, name: str, versions: Mapping[str, str]) -> None:
        """Notes a start, and the entries that stood unsigned behind the last signature, then signs the log.

        They are what a coordinator that was killed had not signed yet, or what somebody has added who can
        write the database and has no key: from here on they are signed, and marked for what they are.
        """
        unsigned = await self._database.read(store.unsigned)
        detail = dict(versions) | ({"unsigned": list(unsigned)} if unsigned else {})
        await self.note(store.COORDINATOR, "coordinator_started", name, **detail)
        await self.seal()

    async def note(self, actor: str, action: str, target: str = "", **detail: Any) -> None:
        """Appends an entry; it is durable when this returns."""
        item = entry(self._clock(), actor, action, target, detail)
        await self._database.write(lambda connection: store.append(connection, item))

    def refused(self, actor: str, action: str, reason: str, source: str) -> None:
        """Remembers a refusal for the next write; beyond what entries there may be they are only counted.

        The log is for ever, so strangers must not fill it: ten at once and sixty an hour of one actor at one
        address, sixty at once and six hundred an hour of all.
        """
        self.refusals += 1
        if self._own.allows((actor, source)) and self._all.allows(""):
            detail = {"reason": reason[:300], "source": source[:100]}
            self._waiting.append(entry(self._clock(), actor, "refused", action, detail))
        else:
            self._unwritten += 1

    async def watch(self) -> None:
        """Writes refusals and signs what is new, once a minute; runs until cancelled."""
        while True:
            await asyncio.sleep(SEAL_SECONDS)
            try:
                await self.seal()
            except StorageError as error:
                log.error("the audit log is not signed for now: %s", error)

    async def seal(self) -> None:
        """Writes the refusals that wait, and signs the log up to its end."""
        now = self._clock()
        waiting, self._waiting = self._waiting, []
        unwritten, self._unwritten = self._unwritten, 0
        items = list(waiting)
        if unwritten:
            items.append(entry(now, store.COORDINATOR, "refused", "", {"further_refusals": unwritten}))
        try:
            made = await self._database.write(lambda connection: self._seal(connection, items, now))
        except StorageError:
            # They wait for the next time: a database that is away loses none.
            self._waiting = waiting + self._waiting
            self._unwritten += unwritten
            raise
        self.sealed = made or self.sealed

    async def lines(self, first: int, live: bool = False) -> AsyncIterator[list[str]]:
        """Yields the log from an entry on, in pages, signed up to its end; from the beginning of the archive
        that holds the entry, if one does.

        Of a `live` log the archives' statements stand for them. StorageError where an archive is damaged.
        """
        await self.seal()
        rows = await self._database.read(archives)
        for row in rows:
            if live:
                yield [row.line]
            elif row.last >= first:
                lines = unpack(await asyncio.to_thread(self._load, row.artifact))
                while page := await asyncio.to_thread(lambda: list(islice(lines, PAGE))):  # noqa: B023
                    yield page
        place = min(max(1, first, rows[-1].last + 1 if rows else 1), LAST)
        while True:
            begin = place
            page, place = await self._database.read(
                lambda connection, begin=begin: store.lines(connection, begin, PAGE)  # type: ignore[misc]
            )
            if not page:
                return
            yield page

    def _seal(self, connection: Connection, items: list[AuditEntry], now: float) -> tuple[int, str] | None:
        if items:
            store.append(connection, *items)
        return store.seal(connection, self._identity, now) if self._identity is not None else None
