"""Takes old entries of the audit log out of the database, into archives that are artifacts.

An archive is written, synced and read back as it lies on the disk before one transaction puts it on record
and deletes its entries; it passes the fence, so only the active coordinator archives. After a crash before it
the log is as it was, and the file one that nothing mentions, which `Retention.sweep` deletes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Connection

from roundtable.core.errors import ConfigError, RoundtableError, StorageError
from roundtable.core.evidence.audit_archive import LinesDigest, LogArchive, pack, statement_line, unpack
from roundtable.core.evidence.audit_log import AuditEntry, entry, read_log
from roundtable.core.identity.credentials import IDENTITY_KEY, SiloIdentity
from roundtable.server.config import ServerConfig
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.replicas import Replicas
from roundtable.server.store import ArtifactRow, Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store.audit_archives import ArchiveRow, between, ripe, take_out

log = logging.getLogger("roundtable.server.storage.audit_archiving")

KIND = "audit"
GATHERED_SECONDS = 30 * 86400.0
"""An archive is begun once its first entry is so much older than it must be: not one each hour."""


def check_can_archive(config: ServerConfig) -> None:
    """ConfigError where archives are wanted and there is nothing to sign them with."""
    if config.retention.audit and not (Path(config.credentials) / IDENTITY_KEY).exists():
        raise ConfigError(
            f"[retention] audit archives the audit log under a signature, and {config.credentials} has no "
            f"{IDENTITY_KEY}: issue the credentials anew, or leave audit out"
        )


class AuditArchiving:
    """Archives what is older than `seconds`; nothing if that is 0."""

    def __init__(
        self,
        database: Database,
        artifacts: ArtifactStore,
        replicas: Replicas,
        identity: SiloIdentity | None,
        ca: bytes,
        seconds: float,
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self._replicas = replicas
        self._identity = identity
        self._ca = ca
        self._seconds = seconds

    async def run(self, now: float) -> int:
        """Archives all that is due; returns how many entries."""
        count = 0
        while self._seconds:
            try:
                archived = await self._archive(now)
            except RoundtableError as error:
                log.error("the audit log is not archived for now: %s", error)
                break
            if not archived:
                break
            count += archived
        return count

    async def _archive(self, now: float) -> int:
        before = now - self._seconds
        due = await self._database.read(lambda c: ripe(c, before, before - GATHERED_SECONDS))
        if due is None:
            return 0
        archive, document, digest, size = await asyncio.to_thread(self._write, *due, now)
        try:
            await asyncio.to_thread(self._check, digest, archive)
            artifact = ArtifactRow(digest, size, KIND, now)
            row = ArchiveRow(archive.first, archive.last, json.dumps(document), digest, now)
            count = await self._database.write(lambda c: self._take_out(c, row, artifact))
        finally:
            self._artifacts.unpin([digest])
        self._replicas.offer(digest)
        log.info("archived entries %d to %d of the audit log as %s", archive.first, archive.last, digest)
        return count

    def _write(
        self, first: int, last: int, previous: str, now: float
    ) -> tuple[LogArchive, dict[str, Any], str, int]:
        """The archive's statement, and its pinned artifact. Blocks."""
        identity = self._identity
        assert identity is not None
        made: list[tuple[LogArchive, dict[str, Any]]] = []

        def lines(connection: Connection) -> Iterator[str]:
            digest, end = LinesDigest(), ""
            for line in between(connection, first, last):
                digest.add(line)
                if line.startswith('{"entry"'):
                    end = AuditEntry(**json.loads(line)["entry"]).hash
                yield line
            archive = LogArchive(first, last, previous, end, digest.hex())
            document = archive.signed(identity, now)
            made.append((archive, document))
            yield statement_line(document)

        with self._database.snapshot() as connection:
            digest, size = self._artifacts.create(pack(lines(connection)))
        return *made[0], digest, size

    def _check(self, digest: str, archive: LogArchive) -> None:
        """StorageError unless the artifact holds the entries, read as it lies there. Blocks."""
        start = archive.first - 1, archive.previous
        found = read_log(unpack(self._artifacts.load(digest)), self._ca, "coordinator", start)
        if found.absent or (found.end, found.hash_of(found.end)) != (archive.last, archive.hash):
            raise StorageError(f"{archive.name} does not hold what was written into it")

    def _take_out(self, connection: Connection, row: ArchiveRow, artifact: ArtifactRow) -> int:
        assert self._identity is not None
        detail = {"first": row.first, "last": row.last, "artifact": row.artifact}
        audit_store.append(connection, entry(row.time, audit_store.COORDINATOR, "audit_archived", "", detail))
        audit_store.seal(connection, self._identity, row.time)
        return take_out(connection, row, artifact)
