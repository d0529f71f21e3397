"""The database: one thread writes, a few read, and every failure is a StorageError with advice.

SQLite runs in WAL mode with `synchronous=FULL`: a transaction that has returned survives a loss of
power. PostgreSQL does the same by default.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

from roundtable.core.errors import ConfigError, StorageError
from roundtable.core.machine.file_locks import lock_file
from roundtable.core.machine.possible import must_be_possible
from roundtable.server.store import tables
from roundtable.server.store.migrate import is_current, upgrade

Result = TypeVar("Result")
BUSY_SECONDS = 10
PASSING = ("starting up", "shutting down", "in recovery mode", "too many clients", "not yet accepting")
UPGRADE_LOCK = 7443
FILES_LOCK = 7444


class DatabaseUnreachable(StorageError):
    """Nobody answers at the database's address, or it is just starting or stopping: it may answer later."""


class LeaseLost(StorageError):
    """Another coordinator has taken over: every write of this one is refused from now on."""


class Database:
    """An opened database whose tables are up to date.

    `write` and `read` run a function on a connection, in a transaction, in another thread. `fence`, if
    there is one, comes first in every transaction that writes, and raises where it must not. `waiting`
    counts transactions that are to be written or are being written.
    """

    def __init__(self, url: URL, writer: Engine, reader: Engine) -> None:
        self.url = url.render_as_string(hide_password=True)
        self.address = url.render_as_string(hide_password=False)
        self.embedded = url.get_backend_name() == "sqlite"
        self.file = Path(str(url.database))
        self.identity = ""
        self.waiting = 0
        self.fence: Callable[[Connection], None] | None = None
        self._writer = writer
        self._reader = reader
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._read_threads = ThreadPoolExecutor(2, thread_name_prefix="database-read")
        self._standing: Connection | None = None

    @classmethod
    def open(cls, address: str) -> Database:
        """Connects and applies migrations.

        Raises ConfigError for an address that is none, StorageError where the database cannot be
        reached or written, or was made by a newer version.
        """
        database = cls.connect(address)
        try:
            database.prepare()
        except StorageError:
            database.close()
            raise
        return database

    @classmethod
    def connect(cls, address: str, stalled_seconds: float = 0.0) -> Database:
        """Without touching the tables. PostgreSQL ends a transaction in which we stand still for
        `stalled_seconds` (0: never)."""
        must_be_possible("a coordinator")
        url = _parse(address)
        options = {"idle_in_transaction_session_timeout": round(1000 * stalled_seconds)}
        return cls(url, _engine(url, "BEGIN IMMEDIATE", options), _engine(url, "BEGIN", options))

    def prepare(self) -> None:
        """Applies migrations. StorageError where the database cannot be written or is a newer version's."""
        with self.transaction() as connection:
            if not self.embedded:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(UPGRADE_LOCK)))
            upgrade(connection, self.url)
            self.identity = _identity(connection)

    def look(self) -> tuple[str, bool]:
        """(identity, whether there is a lease) as they are, empty and False in a new database.

        Changes nothing. StorageError where it cannot be read or a newer version has written it.
        """
        with self.transaction() as connection:
            is_current(connection, self.url)
            inspector = sa.inspect(connection)
            if not inspector.has_table("coordinator"):
                return "", False
            identity = connection.execute(sa.select(tables.coordinator.c.identity)).scalar_one_or_none()
            return str(identity or ""), inspector.has_table("lease")

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection in this thread that sees the database as it is now, for as long as the block lasts."""
        level = {} if self.embedded else {"isolation_level": "REPEATABLE READ"}
        try:
            with self._reader.connect().execution_options(**level) as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps every process from deleting artifacts while the block lasts and this process lives.

        PostgreSQL knows of it by a lock of a transaction, those who use a SQLite file by one on its folder.
        """
        if self.embedded:
            with self._folder() as descriptor:
                lock_file(descriptor, wait=True, shared=True)
                yield
            return
        try:
            with self._reader.connect() as connection, connection.begin():
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock_shared(FILES_LOCK)))
                yield
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error

    @contextmanager
    def deleting(self, connection: Connection) -> Iterator[bool]:
        """Whether artifacts may be deleted within the block, in this transaction: not while any are held."""
        if not self.embedded:
            yield bool(connection.execute(sa.select(sa.func.pg_try_advisory_xact_lock(FILES_LOCK))).scalar())
            return
        with self._folder() as descriptor:
            try:
                lock_file(descriptor)
            except BlockingIOError:
                yield False
            else:
                yield True

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction in this thread, beside those of `write`; it passes no fence."""
        try:
            with self._writer.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error

    async def write(self, work: Callable[[Connection], Result]) -> Result:
        """Runs `work` in one transaction on the writer's thread; committed when this returns."""
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._write_thread, self._run, self._writing, work, True
            )
        finally:
            self.waiting -= 1

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Runs `work` on a consistent view, beside the writer."""
        return await asyncio.get_running_loop().run_in_executor(
            self._read_threads, self._run, self._reader.begin, work
        )

    def close(self) -> None:
        """Waits for what is being written and closes all connections."""
        self._write_thread.shutdown(wait=True)
        self._read_threads.shutdown(wait=True)
        self._let_go()
        self._writer.dispose()
        self._reader.dispose()

    @contextmanager
    def _folder(self) -> Iterator[int]:
        # The folder itself: a lock file that root has made for a backup could be closed to the coordinator.
        descriptor = os.open(self.file.parent, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction of the writer's thread. To a file it has a connection that stays: taking one from the
        pool and giving it back costs as much as five statements. To a server each is looked at first."""
        if not self.embedded:
            with self._writer.begin() as connection:
                yield connection
            return
        connection = self._standing = self._standing or self._writer.connect()
        try:
            with connection.begin():
                yield connection
        except BaseException:
            # Whatever it was, the next transaction begins with a connection of its own.
            self._let_go()
            raise

    def _let_go(self) -> None:
        connection, self._standing = self._standing, None
        if connection is not None:
            connection.close()

    def _run(
        self,
        begin: Callable[[], AbstractContextManager[Connection]],
        work: Callable[[Connection], Result],
        writes: bool = False,
    ) -> Result:
        try:
            with begin() as connection:
                if writes and self.fence is not None:
                    self.fence(connection)
                return work(connection)
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error


def explain(error: SQLAlchemyError, url: str) -> StorageError:
    """Translates a database driver's error into one that says what to do about it."""
    text = str(error.orig if isinstance(error, DBAPIError) else error).strip().split("\n")[0]
    lowered = text.lower()
    if "disk is full" in lowered or "no space left" in lowered or "disk full" in lowered:
        advice = "the disk is full: free some space; nothing half written remains"
    elif "locked" in lowered or "busy" in lowered:
        advice = "another process holds it: does a second coordinator run on the same file?"
    elif "readonly" in lowered or "unable to open" in lowered or "permission denied" in lowered:
        advice = "its folder must exist and be writable by the user who runs the coordinator"
    elif "malformed" in lowered or "not a database" in lowered:
        advice = "the file is damaged or is none of ours: restore it from a backup"
    elif "password" in lowered:
        advice = "the password in `database` is wrong or missing: correct it there, or in ~/.pgpass"
    elif url.startswith("postgresql"):
        advice = "is PostgreSQL running there, and may this user connect?"
        # What PostgreSQL itself refuses is FATAL: a name or a right that is missing does not heal by waiting.
        passing = any(words in lowered for words in PASSING)
        if isinstance(error, OperationalError) and (passing or "fatal" not in lowered):
            return DatabaseUnreachable(f"database {url}: {text}; {advice}")
    else:
        advice = "see the coordinator's log"
    return StorageError(f"database {url}: {text}; {advice}")


def _parse(address: str) -> URL:
    try:
        url = make_url(address)
    except ArgumentError:
        raise ConfigError(
            "the database must be an address such as sqlite:///state/coordinator.db or "
            "postgresql://user@host/name"
        ) from None
    if address.count("@") > 1 and url.get_backend_name() != "sqlite":
        # Whatever follows the first one would be taken for the host, and be shown in messages.
        raise ConfigError("the database's address holds more than one @: in a password write it as %40")
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(f"database {url.drivername!r} is not supported: use sqlite or postgresql")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError("a SQLite database needs a file: sqlite:///state/coordinator.db")
    return url


def _engine(url: URL, begin: str, options: Mapping[str, int]) -> Engine:
    try:
        if url.get_backend_name() != "sqlite":
            settings = " ".join(f"-c {name}={value}" for name, value in options.items())
            arguments = {"connect_timeout": BUSY_SECONDS, "options": settings}
            return sa.create_engine(url, pool_pre_ping=True, connect_args=arguments)
        _make_folder(Path(str(url.database)).parent)
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    except (NoSuchModuleError, ImportError) as error:
        raise ConfigError(
            f"the driver for {url.drivername} is not installed ({error}): "
            "pip install 'roundtable-fl[postgresql]'"
        ) from error

    @sa.event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        # Transactions are begun by us, below: the driver's own rules would begin them too late.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made for the database: {error.strerror}") from error


def _identity(connection: Connection) -> str:
    """The coordinator's identity: made once, the same for the life of the database."""
    identity = connection.execute(sa.select(tables.coordinator.c.identity)).scalar_one_or_none()
    if identity is not None:
        return str(identity)
    identity = secrets.token_hex(16)
    connection.execute(sa.insert(tables.coordinator).values(id=1, identity=identity, created=time.time()))
    return identity
