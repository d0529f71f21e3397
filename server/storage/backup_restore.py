"""Fills an empty database and an empty artifact folder from a backup, once everything in it is verified."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from blake3 import blake3
from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.evidence.audit_log import entry
from roundtable.core.identity.credentials import CA_CERTIFICATE, SiloIdentity, identity_of, load_silo_identity
from roundtable.core.machine.file_access import sync_folder
from roundtable.server.config import ServerConfig
from roundtable.server.storage.backup_folder import MANIFEST, BackupFolder, object_name
from roundtable.server.storage.backup_proof import NOT_IN_BACKUPS, check_files, check_rows, open_manifest
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.copies import checked, make_folders, write_file
from roundtable.server.storage.location import blob_name
from roundtable.server.storage.sealing import BackupKey
from roundtable.server.store import Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store.migrate import make, upgrade

Tell = Callable[[str], None]


def restore(
    config: ServerConfig,
    folder: Path,
    new_identity: bool = False,
    accept_ended: bool = False,
    *,
    key: BackupKey | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Fills an empty database and an empty artifact folder; the manifest.

    With `new_identity` silos take the coordinator for another one and forget what they have done for the
    old: needed where they have gone on since the backup. Everything is verified before anything is written:
    the coordinator's signature, every file's digest, the audit log, and that who may do what follows from it.
    With `accept_ended` the certificate that signed may have ended since. The restored audit log goes on with
    an entry that says what was restored. Where it fails, the folder is as empty as it was.

    Raises StorageError for a backup that is not signed by this coordinator, altered, damaged, half written or
    of a newer version, and where the database or the folder is not empty; IdentityError without an identity.
    """
    backup = BackupFolder.open(folder, key)
    tell("checking every file of the backup")
    manifest, identity = _verified(config, backup, accept_ended)
    target = Path(config.artifacts)
    bucket = Bucket(config.bucket) if config.bucket else None
    if (target / "coordinator").exists():
        raise StorageError(f"{target} holds artifacts already: restore into an empty folder")
    if any((objects := target / "objects").glob("*/*")):
        raise StorageError(
            f"{objects} holds artifacts, and no coordinator is named beside it, as a restore leaves it that "
            "was killed: delete that folder, or restore into an empty one"
        )
    if bucket is not None and not bucket.is_empty():
        raise StorageError(f"{bucket.address} holds something already: restore into an empty bucket")
    make_folders(target)
    database = Database.connect(config.database)
    try:
        with database.transaction() as connection:
            if sa.inspect(connection).get_table_names():
                raise StorageError(f"database {database.url} is not empty: restore into a new one")
            make(connection, manifest["revision"])
            _load(connection, backup, manifest, database.embedded)
            name = secrets.token_hex(16) if new_identity else manifest["identity"]
            connection.execute(sa.text("UPDATE coordinator SET identity = :new"), {"new": name})
            upgrade(connection, database.url)
            _note(connection, identity, backup, manifest, name)
            if bucket is not None:
                bucket.open(name)
            _fill(target, bucket, backup, manifest["artifacts"], tell)
            write_file(target / "coordinator", [name.encode("ascii")])
            sync_folder(target)
        database.prepare()
    finally:
        database.close()
    return manifest


def _verified(
    config: ServerConfig, backup: BackupFolder, accept_ended: bool
) -> tuple[dict[str, Any], SiloIdentity]:
    """The manifest of a backup in which everything holds, and what this coordinator signs with."""
    credentials = Path(config.credentials)
    identity = load_silo_identity(credentials)
    ca = (credentials / CA_CERTIFICATE).read_bytes()
    found = open_manifest(backup, ca, identity_of(identity.certificate)[0])
    check_files(backup, found.values)
    check_rows(backup, found.values, ca)
    if found.ends < time.time() and not accept_ended:
        raise StorageError(
            f"the backup in {backup.path} is signed with a certificate that has ended: who has that key by "
            "now could have made it. If it was never out of your hands: `roundtable restore --accept-ended`"
        )
    return found.values, identity


def _note(
    connection: Connection, identity: SiloIdentity, backup: BackupFolder, manifest: dict[str, Any], name: str
) -> None:
    """Writes into the restored audit log what was restored, and signs it."""
    now = time.time()
    detail = {
        "manifest": blake3(b"".join(backup.read(MANIFEST))).hexdigest(),
        "made": manifest["time"],
        "audit": manifest["audit"],
        "identity": name,
        "new_identity": name != manifest["identity"],
    }
    who = identity_of(identity.certificate)[0]
    audit_store.append(connection, entry(now, audit_store.COORDINATOR, "restored", who, detail))
    audit_store.seal(connection, identity, now)


def _fill(target: Path, bucket: Bucket | None, backup: BackupFolder, digests: list[str], tell: Tell) -> None:
    """Writes all artifacts; none of them stays where that fails."""
    objects = target / "objects"
    try:
        for number, digest in enumerate(digests):
            tell(f"artifact {number + 1} of {len(digests)}")
            place = objects / blob_name(digest)
            make_folders(place.parent)
            write_file(place, checked(digest, backup.read(object_name(digest)), f"in {backup.path}"))
            if bucket is not None:
                bucket.put(place, digest)
        for folder in [objects, *objects.iterdir()] if digests else []:
            sync_folder(folder)
    except BaseException:
        shutil.rmtree(objects, ignore_errors=True)
        if bucket is not None:
            bucket.clear()
        raise


def _load(connection: Connection, backup: BackupFolder, manifest: dict[str, Any], embedded: bool) -> None:
    metadata = sa.MetaData()
    metadata.reflect(connection)
    for table in metadata.sorted_tables:
        name = f"tables/{table.name}.jsonl"
        if name not in manifest["files"] or table.name in NOT_IN_BACKUPS:
            continue
        if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar():
            connection.execute(sa.delete(table))
        for line in backup.lines(name):
            row = {key: _value(value) for key, value in json.loads(line).items()}
            connection.execute(sa.insert(table).values(row))
        if not embedded:
            _count_on(connection, table)


def _count_on(connection: Connection, table: sa.Table) -> None:
    """Lets PostgreSQL's sequences go on after the greatest number that was restored."""
    for column in table.primary_key.columns:
        if isinstance(column.type, sa.Integer):
            sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
            if connection.execute(sa.select(sequence)).scalar() is not None:
                top = sa.select(sa.func.coalesce(sa.func.max(column), 0) + 1).scalar_subquery()
                connection.execute(sa.select(sa.func.setval(sequence, top, False)))


def _value(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
