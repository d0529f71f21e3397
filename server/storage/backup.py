"""A coordinator's whole state in a folder, and back: rows as JSON lines, artifacts by digest, all verified.

    FOLDER/tables/NAME.jsonl    every row, as one consistent view of the database had it
    FOLDER/objects/ab/abcdef…   every artifact that those rows mention
    FOLDER/manifest.json        digests of all that, signed by the coordinator; written last, so that half a
                                backup is none

A backup may be made while the coordinator runs, and restored into either kind of database. What it does not
hold: certificates and keys, and what had arrived of uploads that were under way.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from blake3 import blake3
from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.evidence.audit_log import entry
from roundtable.core.identity.credentials import CA_CERTIFICATE, SiloIdentity, identity_of, load_silo_identity
from roundtable.server.config import ServerConfig
from roundtable.server.storage.backup_proof import (
    FORMAT,
    MANIFEST,
    READ_BYTES,
    check_files,
    check_rows,
    open_manifest,
    signed_manifest,
)
from roundtable.server.storage.blobs import os_error, sync_folder
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.location import blob_name
from roundtable.server.store import Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store.migrate import make, revision_of, upgrade

TRIES = 3
LEFT_OUT = {"alembic_version", "lease"}


class Vanished(Exception):
    """Retention has deleted an artifact that the view still mentions."""


def back_up(config: ServerConfig, folder: Path) -> dict[str, Any]:
    """Writes a backup into `folder`, which must be empty or not there; its manifest.

    It is signed with the coordinator's identity. Raises IdentityError where there is none, StorageError where
    an artifact is damaged or the database cannot be read, ResourceError where the disk is full.
    """
    identity = load_silo_identity(Path(config.credentials))
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty: a backup needs a folder of its own")
    database = Database.connect(config.database)
    try:
        for _ in range(TRIES):
            try:
                return _write_all(database, config, folder, identity)
            except Vanished:
                continue
        raise StorageError(
            f"artifacts are missing from {config.bucket or config.artifacts}, or damaged there, though the "
            "database mentions them"
        )
    finally:
        database.close()


def restore(
    config: ServerConfig, folder: Path, new_identity: bool = False, accept_ended: bool = False
) -> dict[str, Any]:
    """Fills an empty database and an empty artifact folder; the manifest.

    With `new_identity` silos take the coordinator for another one and forget what they have done for the
    old: needed where they have gone on since the backup. Everything is verified before anything is written:
    the coordinator's signature, every file's digest, the audit log, and that who may do what follows from it.
    With `accept_ended` the certificate that signed may have ended since. The restored audit log goes on with
    an entry that says what was restored.

    Raises StorageError for a backup that is not signed by this coordinator, altered, damaged, half written or
    of a newer version, and where the database or the folder is not empty; IdentityError without an identity.
    """
    manifest, identity = _verified(config, folder, accept_ended)
    target = Path(config.artifacts)
    bucket = Bucket(config.bucket) if config.bucket else None
    if (target / "coordinator").exists() or any((target / "objects").glob("*/*")):
        raise StorageError(f"{target} holds artifacts already: restore into an empty folder")
    if bucket is not None and not bucket.is_empty():
        raise StorageError(f"{bucket.address} holds something already: restore into an empty bucket")
    make_folders(target)
    database = Database.connect(config.database)
    try:
        with database.transaction() as connection:
            if sa.inspect(connection).get_table_names():
                raise StorageError(f"database {database.url} is not empty: restore into a new one")
            make(connection, manifest["revision"])
            _load(connection, folder, manifest, database.embedded)
            name = secrets.token_hex(16) if new_identity else manifest["identity"]
            connection.execute(sa.text("UPDATE coordinator SET identity = :new"), {"new": name})
            upgrade(connection, database.url)
            _note(connection, identity, folder, manifest, name)
            if bucket is not None:
                bucket.open(name)
            for digest in manifest["artifacts"]:
                copy_artifact(folder / "objects", target / "objects", digest)
                if bucket is not None:
                    bucket.put(folder / "objects" / blob_name(digest), digest)
            (target / "coordinator").write_text(name, encoding="ascii")
            sync_folder(target)
        database.prepare()
    finally:
        database.close()
    return manifest


def _verified(config: ServerConfig, folder: Path, accept_ended: bool) -> tuple[dict[str, Any], SiloIdentity]:
    """The manifest of a backup in which everything holds, and what this coordinator signs with."""
    credentials = Path(config.credentials)
    identity = load_silo_identity(credentials)
    ca = (credentials / CA_CERTIFICATE).read_bytes()
    found = open_manifest(folder, ca, identity_of(identity.certificate)[0])
    check_files(folder, found.values)
    check_rows(folder, found.values, ca)
    if found.ends < time.time() and not accept_ended:
        raise StorageError(
            f"the backup in {folder} is signed with a certificate that has ended: who has that key by now "
            "could have made it. If it was never out of your hands: `roundtable restore --accept-ended`"
        )
    return found.values, identity


def _note(
    connection: Connection, identity: SiloIdentity, folder: Path, manifest: dict[str, Any], name: str
) -> None:
    """Writes into the restored audit log what was restored, and signs it."""
    now = time.time()
    detail = {
        "manifest": blake3((folder / MANIFEST).read_bytes()).hexdigest(),
        "made": manifest["time"],
        "audit": manifest["audit"],
        "identity": name,
        "new_identity": name != manifest["identity"],
    }
    who = identity_of(identity.certificate)[0]
    audit_store.append(connection, entry(now, audit_store.COORDINATOR, "restored", who, detail))
    audit_store.seal(connection, identity, now)


def make_folders(*folders: Path) -> None:
    """Makes missing folders, readable by this user alone."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise os_error(error, folder) from error


def _write_all(
    database: Database, config: ServerConfig, folder: Path, identity: SiloIdentity
) -> dict[str, Any]:
    objects = Path(config.artifacts) / "objects"
    bucket = Bucket(config.bucket) if config.bucket else None
    make_folders(folder, folder / "tables")
    with database.snapshot() as connection:
        metadata = sa.MetaData()
        metadata.reflect(connection)
        tables = [table for table in metadata.sorted_tables if table.name not in LEFT_OUT]
        if "coordinator" not in metadata.tables:
            raise StorageError(f"database {database.url} holds no coordinator's state")
        files = {f"tables/{table.name}.jsonl": _dump(connection, table, folder) for table in tables}
        manifest = {
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
    for digest in manifest["artifacts"]:
        if bucket is None:
            copy_artifact(objects, folder / "objects", digest)
        else:
            fetch_artifact(bucket, folder / "objects" / blob_name(digest))
    path = folder / MANIFEST
    _write(path.with_suffix(".partial"), [signed_manifest(identity, manifest)])
    path.with_suffix(".partial").replace(path)
    sync_folder(folder)
    return manifest


def _dump(connection: Connection, table: sa.Table, folder: Path) -> str:
    rows = (
        json.dumps({key: _plain(value) for key, value in row._mapping.items()}).encode() + b"\n"
        for row in connection.execute(sa.select(table).order_by(*table.primary_key.columns))
    )
    return _write(folder / "tables" / f"{table.name}.jsonl", rows)


def _load(connection: Connection, folder: Path, manifest: dict[str, Any], embedded: bool) -> None:
    metadata = sa.MetaData()
    metadata.reflect(connection)
    for table in metadata.sorted_tables:
        path = folder / "tables" / f"{table.name}.jsonl"
        if f"tables/{table.name}.jsonl" not in manifest["files"]:
            continue
        if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar():
            connection.execute(sa.delete(table))
        with path.open("rb") as file:
            for line in file:
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


def copy_artifact(source: Path, target: Path, digest: str) -> None:
    """Copies an artifact, hashing what is read; what is there already is not copied again."""
    place = target / digest[:2] / digest
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    try:
        found = _write(partial, _pieces(source / digest[:2] / digest))
    except FileNotFoundError as error:
        partial.unlink(missing_ok=True)
        raise Vanished from error
    if found != digest:
        partial.unlink()
        raise StorageError(f"artifact {digest} in {source} is damaged: its bytes have the digest {found}")
    partial.replace(place)
    sync_folder(place.parent)


def fetch_artifact(bucket: Bucket, place: Path) -> None:
    """Fetches an artifact from the bucket, as a coordinator on another machine would."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    if not bucket.get(place.name, partial):
        raise Vanished
    partial.replace(place)
    sync_folder(place.parent)


def _write(path: Path, blocks: Iterator[bytes] | list[bytes]) -> str:
    found = blake3()
    try:
        with path.open("wb") as file:
            for block in blocks:
                found.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        raise os_error(error, path) from error
    return found.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data


def _plain(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _value(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
