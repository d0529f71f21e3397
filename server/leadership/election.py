"""From a process that wants to be the coordinator to the only one that is, and the end of that."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path

from roundtable.core.errors import ResourceError, StorageError
from roundtable.core.identity.credentials import Credentials
from roundtable.core.machine.file_locks import lock_file
from roundtable.core.observability.logs import announce
from roundtable.core.observability.watchdog import tell_systemd
from roundtable.server.config import ServerConfig
from roundtable.server.leadership.lease import Lease
from roundtable.server.leadership.standby import standing_by
from roundtable.server.storage.artifact_store import check_owner
from roundtable.server.storage.bucket import Bucket
from roundtable.server.store import Database
from roundtable.server.store.database import LeaseLost

log = logging.getLogger("roundtable.server.leadership.election")

SHARE_OF_LEASE = 0.25
"""How often, in parts of its length, a lease is renewed, and asked for by those that stand by."""


@dataclass(frozen=True)
class Sight:
    """What a coordinator that stands by has seen of the lease: whose it is, and when that was read (monotonic
    seconds). `failure` is why reading it failed since, empty if it did not."""

    active: str
    read: float
    patience: float
    failure: str = ""

    @property
    def lag(self) -> float:
        """Seconds since the lease was read. Rows and models are shared: it is behind in nothing else."""
        return time.monotonic() - self.read

    @property
    def trouble(self) -> str:
        """Why it could not take over now; empty if it could."""
        if not self.failure and self.lag > self.patience:
            return f"no answer for {self.lag:.0f} s"
        return self.failure


class Leadership:
    """The hold on a database and its artifacts: by locks on files with SQLite, by a lease with PostgreSQL.

    `taken` opens the database once it is this process's to write; `kept` returns when it no longer is.
    `sight` is what it sees while it stands by, None before and after. `listen` and `operators` are the
    addresses to listen at, with the ports that standing by has found where any would do.
    """

    def __init__(self, config: ServerConfig, credentials: Credentials) -> None:
        self._config = config
        self._credentials = credentials
        self.listen = config.listen
        self.operators = config.operators
        self._locks: list[int] = []
        self._database: Database | None = None
        self._lease: Lease | None = None
        self.sight: Sight | None = None

    async def taken(self) -> Database:
        """Waits until the database is ours; at once, unless another coordinator on PostgreSQL has it.

        Raises ResourceError, StorageError or ConfigError, before anything is written, where the database
        or the artifacts are in use by another, of another, or of a newer version.
        """
        config = self._config
        database = await asyncio.to_thread(Database.connect, config.database, config.lease)
        self._database = database
        folder = Path(config.artifacts)
        if database.embedded:
            name = f"{database.file.name}.lock"
            self._locks.append(_lock(folder, "lock", "the artifact folder"))
            self._locks.append(_lock(database.file.parent, name, "the database's folder"))
        identity, has_lease = await asyncio.to_thread(database.look)
        check_owner(folder, identity)
        if config.bucket:
            await asyncio.to_thread(Bucket(config.bucket).check_owner, identity)
        if not has_lease:
            await asyncio.to_thread(database.prepare)
        address = config.announce or config.listen
        self._lease = lease = Lease(database, secrets.token_hex(8), address, config.lease)
        if not await asyncio.to_thread(lease.acquire):
            await self._stand_by(lease)
        await asyncio.to_thread(database.prepare)
        return database

    async def kept(self) -> str:
        """Renews the hold for as long as possible; returns why it is lost."""
        lease, database = self._lease, self._database
        assert lease is not None
        assert database is not None
        if database.embedded:
            # The locks on its files are ours for as long as this process lives.
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(SHARE_OF_LEASE * lease.seconds)
            try:
                await asyncio.to_thread(lease.renew)
            except LeaseLost as error:
                return str(error)
            except StorageError as error:
                log.error("the lease cannot be renewed: %s", error)
                if lease.overdue:
                    return f"the lease could not be renewed for {lease.seconds:g} s: {error}"

    async def left(self) -> None:
        """Gives up the hold, so that another can take over, and closes the database."""
        if self._database is not None:
            if self._lease is not None and self._lease.token and not self._database.embedded:
                await asyncio.to_thread(self._lease.release)
            await asyncio.to_thread(self._database.close)
            self._database = None
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks = []

    def _active(self) -> str:
        return self.sight.active if self.sight else ""

    async def _stand_by(self, lease: Lease) -> None:
        """Refuses calls while another coordinator is active; also waits while the database is away."""
        self.sight = sight = Sight("", time.monotonic(), lease.seconds)
        async with standing_by(self.listen, self.operators, self._credentials, self._active) as ports:
            self.listen, self.operators = ports
            announce(f"coordinator is standing by on {self.listen}; Ctrl-C stops it")
            tell_systemd("standing by", ready=True)
            while True:
                try:
                    active = (await asyncio.to_thread(lease.holder)).address
                    if await asyncio.to_thread(lease.acquire):
                        break
                    if sight.failure:
                        log.info("the database answers again")
                    sight = Sight(active, time.monotonic(), lease.seconds)
                except StorageError as error:
                    if not sight.failure:
                        log.error("this coordinator stands by and cannot take over: %s", error)
                    sight = replace(sight, failure=str(error))
                self.sight = sight
                await asyncio.sleep(SHARE_OF_LEASE * lease.seconds)
        self.sight = None
        log.warning("this coordinator takes over, under lease number %d", lease.token)


def _lock(folder: Path, name: str, what: str) -> int:
    """Locks a file, so that no two coordinators work on the same folder; returns its descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ResourceError(
            f"{what} {folder} cannot be used: {error.strerror}; it must be writable "
            "by the user who runs the coordinator"
        ) from error
    try:
        lock_file(descriptor)
    except OSError:
        os.close(descriptor)
        raise ResourceError(
            f"{what} {folder} is in use by another coordinator; stop that one first, give this one a state "
            "folder of its own, or use PostgreSQL for a second coordinator that stands by"
        ) from None
    return descriptor
