"""What makes a backup believed: the coordinator's signature under its manifest, and the audit log inside it.

Whoever can write into a backup could otherwise add an administrator's token, or take a revocation out. The
manifest names every file by its digest and is signed with the coordinator's identity. Besides, the rows that
say who may do what must follow from the audit log: also a row that was put into the database itself, before
the backup was made, is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from roundtable.core.errors import AuditError, IdentityError, StorageError
from roundtable.core.evidence.audit_archive import unpack
from roundtable.core.evidence.audit_log import AuditEntry, Log, read_log
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import Signed, envelope, open_envelope
from roundtable.server.storage.backup_folder import MANIFEST, TABLES, BackupFolder, object_name

FORMAT = 2
NOT_IN_BACKUPS = frozenset({"alembic_version", "lease", "page_sessions", "invitations", "pending"})
"""Tables of which nothing is copied and nothing restored. The last three let somebody in, or wait for a
second person, for a time: no entry of the audit log says that a row was not added, and one that was used up
or ended since would be good again. People sign in, invite and ask anew."""
_NAMED = 10
Rows = list[dict[str, Any]]


def signed_manifest(identity: SiloIdentity, manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it is stored."""
    return json.dumps(envelope(identity, "backup", manifest), indent=1).encode()


def open_manifest(backup: BackupFolder, ca: bytes, coordinator: str) -> Signed:
    """The manifest of a backup that this coordinator has signed; StorageError otherwise."""
    folder = backup.path
    if not (folder / MANIFEST).exists():
        raise StorageError(f"{folder} holds no whole backup: there is no {MANIFEST}")
    try:
        document = json.loads(b"".join(backup.read(MANIFEST)))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{folder}/{MANIFEST} is damaged: {error}") from error
    if not isinstance(document, dict) or "signature" not in document:
        raise StorageError(
            f"the backup in {folder} is not signed: anybody could have made it or changed it, and nothing of "
            "it is restored. Make a new one with `roundtable backup`"
        )
    try:
        found = open_envelope(document, ca, "coordinator", "backup")
    except IdentityError as error:
        raise StorageError(f"the backup in {folder} proves nothing: {MANIFEST}: {error}") from error
    if found.signer != coordinator:
        raise StorageError(
            f"the backup in {folder} is signed by {found.signer!r}, and this coordinator is {coordinator!r}: "
            "restore it with credentials of that name"
        )
    if found.values.get("format") != FORMAT:
        raise StorageError(
            f"the backup in {folder} has format {found.values.get('format')!r}, this version knows {FORMAT}"
        )
    return found


def check_files(backup: BackupFolder, manifest: Mapping[str, Any]) -> None:
    """StorageError naming each file that is missing, changed or added."""
    wanted = dict(manifest["files"]) | {object_name(digest): digest for digest in manifest["artifacts"]}
    differing = [words for name, digest in wanted.items() if (words := _difference(backup, name, digest))]
    tables = {f"{TABLES}/{path.name}" for path in (backup.path / TABLES).iterdir()}
    differing += [f"{name} was added" for name in sorted(tables - wanted.keys())]
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise StorageError(f"the backup is damaged or was altered: {'; '.join(differing[:_NAMED])}{more}")


def check_rows(backup: BackupFolder, manifest: Mapping[str, Any], ca: bytes) -> Log:
    """The audit log in a backup. StorageError where it does not hold, or where rows do not follow from it."""
    try:
        log = read_log(_audit_lines(backup, f"{TABLES}/archives.jsonl" in manifest["files"]), ca)
    except AuditError as error:
        raise StorageError(f"the audit log in the backup does not hold: {error}") from error
    if [log.end, log.hash_of(log.end)] != list(manifest["audit"]):
        raise StorageError("the audit log in the backup does not end where its manifest says")
    contradictions = [*_tokens(backup, log), *_revocations(backup, log), *_certificates(backup, log)]
    if contradictions:
        raise StorageError(
            f"the backup contradicts its own audit log: {'; '.join(contradictions[:_NAMED])}. Somebody has "
            "written into the database; nothing is restored"
        )
    return log


def _difference(backup: BackupFolder, name: str, digest: str) -> str:
    try:
        return "" if backup.digest(name) == digest else f"{PurePath(name).name} was changed"
    except StorageError as error:
        return str(error)


def _rows(backup: BackupFolder, table: str) -> Rows:
    return [json.loads(line) for line in backup.lines(f"{TABLES}/{table}.jsonl")]


def _audit_lines(backup: BackupFolder, has_archives: bool) -> Iterator[str]:
    for row in _rows(backup, "archives") if has_archives else []:
        yield from unpack(b"".join(backup.read(object_name(row["artifact"]))))
    for row in _rows(backup, "audit"):
        yield AuditEntry(**{**row, "detail": json.loads(row["detail"])}).to_line()
    for row in _rows(backup, "seals"):
        yield f'{{"seal":{row["document"]}}}'


def _tokens(backup: BackupFolder, log: Log) -> Iterator[str]:
    made = {item.detail["identifier"]: item for item in log.entries if item.action == "token_created"}
    gone = {item.detail["identifier"] for item in log.entries if item.action == "token_revoked"}
    for row in _rows(backup, "tokens"):
        entry = made.get(row["identifier"])
        stated = {name: row[name] for name in ("identifier", "digest", "role", "expires")}
        if entry is None or entry.object != row["name"] or entry.detail != stated:
            yield f"token {row['name']!r} for the role {row['role']!r} was never created"
        elif row["revoked"] != (row["identifier"] in gone):
            yield f"token {row['name']!r} was revoked, and is not in the table"


def _revocations(backup: BackupFolder, log: Log) -> Iterator[str]:
    """A revocation that is missing lets somebody in again; one that was added shuts somebody out."""
    noted = {
        (item.detail["role"], item.object): item.time for item in log.entries if item.action == "revoked"
    }
    kept = {(row["role"], row["name"]): row["time"] for row in _rows(backup, "revoked")}
    for role, name in sorted(noted.items() ^ kept.items()):
        yield f"the revocation of {role[0]} {role[1]!r} at {name:.0f} is in one of log and table only"


def _certificates(backup: BackupFolder, log: Log) -> Iterator[str]:
    made = {
        serial: item.object
        for item in log.entries
        if item.action in ("enrolled", "renewed")
        for serial in item.detail["serials"]
    }
    for row in _rows(backup, "certificates"):
        if made.get(row["serial"]) != row["name"]:
            yield f"certificate {row['serial'][:16]} of {row['name']!r} was never issued"
