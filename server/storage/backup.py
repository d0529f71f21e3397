"""A coordinator's whole state in a folder: rows as JSON lines, artifacts by digest, all verified and signed.

A backup may be made while the coordinator runs: it first sees to it that no artifact is deleted, then looks
at the database, and then copies what it mentions there. The folder gets its name last: half a backup is none.
What it does not hold: certificates and keys, what had arrived of uploads that were under way, and what lets
somebody in for a time (`NOT_IN_BACKUPS`).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.identity.credentials import CA_CERTIFICATE, SiloIdentity, identity_of, load_silo_identity
from roundtable.server.config import ServerConfig
from roundtable.server.storage.backup_folder import MANIFEST, BackupFolder, object_name, staged
from roundtable.server.storage.backup_proof import (
    FORMAT,
    NOT_IN_BACKUPS,
    open_manifest,
    signed_manifest,
)
from roundtable.server.storage.copies import Vanished, stored_pieces
from roundtable.server.storage.sealing import BackupKey, SetCipher
from roundtable.server.store import Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store.migrate import revision_of


@dataclass
class MadeBackup:
    """A backup that was made: its manifest, and how much of it was copied, or shared with an earlier one.

    `again` counts artifacts that the earlier one mentions and that were copied anew, because they are damaged
    there or on another disk.
    """

    manifest: dict[str, Any]
    encrypted: bool
    copied: int = 0
    copied_bytes: int = 0
    shared: int = 0
    shared_bytes: int = 0
    again: int = 0


def back_up(
    config: ServerConfig,
    folder: Path,
    *,
    since: Path | None = None,
    key: BackupKey | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> MadeBackup:
    """Writes a backup into `folder`, which must be empty or not there, and nothing if that fails.

    It is signed with the coordinator's identity, and encrypted if there is a key. Artifacts that the backup
    `since` has too are not copied but get a second name. `tell` hears how far it is.

    Raises IdentityError where there is no identity, StorageError where an artifact is missing or damaged, the
    database cannot be read or `since` is no backup of this coordinator, ResourceError where the disk is full.
    """
    identity = load_silo_identity(Path(config.credentials))
    earlier, known = _earlier(config, identity, since, key)
    cipher = earlier.cipher if earlier else SetCipher.fresh(key) if key else None
    database = Database.connect(config.database)
    try:
        with staged(folder) as staging, database.held():
            target = BackupFolder.begin(staging, cipher)
            tell("reading the database")
            manifest = _write_tables(database, target)
            made = MadeBackup(manifest, cipher is not None)
            for done, digest in enumerate(manifest["artifacts"]):
                tell(f"artifact {done + 1} of {len(manifest['artifacts'])}")
                _write_artifact(config, target, digest, made, earlier if digest in known else None)
            target.write(MANIFEST, [signed_manifest(identity, manifest)])
        return made
    finally:
        database.close()


def _earlier(
    config: ServerConfig, identity: SiloIdentity, since: Path | None, key: BackupKey | None
) -> tuple[BackupFolder | None, set[str]]:
    """The earlier backup, and the artifacts that it says it has."""
    if since is None:
        return None, set()
    found = BackupFolder.open(since, key)
    ca = (Path(config.credentials) / CA_CERTIFICATE).read_bytes()
    return found, set(open_manifest(found, ca, identity_of(identity.certificate)[0]).values["artifacts"])


def _write_tables(database: Database, target: BackupFolder) -> dict[str, Any]:
    with database.snapshot() as connection:
        metadata = sa.MetaData()
        metadata.reflect(connection)
        tables = [table for table in metadata.sorted_tables if table.name not in NOT_IN_BACKUPS]
        if "coordinator" not in metadata.tables:
            raise StorageError(f"database {database.url} holds no coordinator's state")
        names = {f"tables/{table.name}.jsonl": table for table in tables}
        files = {name: target.write(name, _lines(connection, table)) for name, table in names.items()}
        return {
            "format": FORMAT,
            "time": time.time(),
            "audit": audit_store.end(connection),
            "revision": revision_of(connection),
            "identity": connection.execute(sa.select(metadata.tables["coordinator"].c.identity)).scalar_one(),
            "files": files,
            "artifacts": sorted(
                connection.execute(sa.select(metadata.tables["artifacts"].c.digest)).scalars()
            ),
        }


def _lines(connection: Connection, table: sa.Table) -> Iterator[bytes]:
    for row in connection.execute(sa.select(table).order_by(*table.primary_key.columns)):
        yield json.dumps({key: _plain(value) for key, value in row._mapping.items()}).encode() + b"\n"


def _plain(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _write_artifact(
    config: ServerConfig, target: BackupFolder, digest: str, made: MadeBackup, earlier: BackupFolder | None
) -> None:
    name = object_name(digest)
    if earlier is not None and target.take_over(digest, earlier):
        made.shared += 1
        made.shared_bytes += target.size(name)
        return
    try:
        target.write(name, stored_pieces(config, digest))
    except Vanished as error:
        raise StorageError(
            f"artifact {digest} is missing from {config.bucket or config.artifacts}, though the database "
            "mentions it; no backup was made. It comes back from a copy or an earlier backup"
        ) from error
    made.again += earlier is not None
    made.copied += 1
    made.copied_bytes += target.size(name)
