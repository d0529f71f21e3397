"""What makes a backup believed: the coordinator's signature under its manifest, and the audit log inside it.

Whoever can write into a backup could otherwise add an administrator's token, or take a revocation out. The
manifest names every file by its digest and is signed with the coordinator's identity. Besides, the rows that
say who may do what must follow from the audit log: also a row that was put into the database itself, before
the backup was made, is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from roundtable.core.errors import AuditError, IdentityError, StorageError
from roundtable.core.evidence.audit_log import AuditEntry, Log, read_log
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import Signed, envelope, open_envelope

FORMAT = 2
MANIFEST = "manifest.json"
READ_BYTES = 4 << 20
_NAMED = 10
Rows = list[dict[str, Any]]


def signed_manifest(identity: SiloIdentity, manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it is stored."""
    return json.dumps(envelope(identity, "backup", manifest), indent=1).encode()


def open_manifest(folder: Path, ca: bytes, coordinator: str) -> Signed:
    """The manifest of a backup that this coordinator has signed; StorageError otherwise."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise StorageError(f"{folder} holds no whole backup: {error.strerror}: {MANIFEST}") from error
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


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """StorageError naming each file that is missing, changed or added."""
    wanted = dict(manifest["files"]) | {
        f"objects/{digest[:2]}/{digest}": digest for digest in manifest["artifacts"]
    }
    differing = [words for name, digest in wanted.items() if (words := _difference(folder / name, digest))]
    tables = {f"tables/{path.name}" for path in (folder / "tables").iterdir()}
    differing += [f"{name} was added" for name in sorted(tables - wanted.keys())]
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise StorageError(f"the backup is damaged or was altered: {'; '.join(differing[:_NAMED])}{more}")


def check_rows(folder: Path, manifest: Mapping[str, Any], ca: bytes) -> Log:
    """The audit log in a backup. StorageError where it does not hold, or where rows do not follow from it."""
    try:
        log = read_log(_lines(folder), ca)
    except AuditError as error:
        raise StorageError(f"the audit log in the backup does not hold: {error}") from error
    if [len(log.entries), log.hash_of(len(log.entries))] != list(manifest["audit"]):
        raise StorageError("the audit log in the backup does not end where its manifest says")
    contradictions = [*_tokens(folder, log), *_revocations(folder, log), *_certificates(folder, log)]
    if contradictions:
        raise StorageError(
            f"the backup contradicts its own audit log: {'; '.join(contradictions[:_NAMED])}. Somebody has "
            "written into the database; nothing is restored"
        )
    return log


def _difference(path: Path, digest: str) -> str:
    found = blake3()
    try:
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                found.update(data)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return "" if found.hexdigest() == digest else f"{path.name} was changed"


def _rows(folder: Path, table: str) -> Rows:
    with (folder / "tables" / f"{table}.jsonl").open("rb") as file:
        return [json.loads(line) for line in file]


def _lines(folder: Path) -> Iterator[str]:
    for row in _rows(folder, "audit"):
        yield AuditEntry(**{**row, "detail": json.loads(row["detail"])}).to_line()
    for row in _rows(folder, "seals"):
        yield f'{{"seal":{row["document"]}}}'


def _tokens(folder: Path, log: Log) -> Iterator[str]:
    made = {item.detail["identifier"]: item for item in log.entries if item.action == "token_created"}
    gone = {item.detail["identifier"] for item in log.entries if item.action == "token_revoked"}
    for row in _rows(folder, "tokens"):
        entry = made.get(row["identifier"])
        stated = {name: row[name] for name in ("identifier", "digest", "role", "expires")}
        if entry is None or entry.object != row["name"] or entry.detail != stated:
            yield f"token {row['name']!r} for the role {row['role']!r} was never created"
        elif row["revoked"] != (row["identifier"] in gone):
            yield f"token {row['name']!r} was revoked, and is not in the table"


def _revocations(folder: Path, log: Log) -> Iterator[str]:
    """A revocation that is missing lets somebody in again; one that was added shuts somebody out."""
    noted = {
        (item.detail["role"], item.object): item.time for item in log.entries if item.action == "revoked"
    }
    kept = {(row["role"], row["name"]): row["time"] for row in _rows(folder, "revoked")}
    for role, name in sorted(noted.items() ^ kept.items()):
        yield f"the revocation of {role[0]} {role[1]!r} at {name:.0f} is in one of log and table only"


def _certificates(folder: Path, log: Log) -> Iterator[str]:
    made = {
        serial: item.object
        for item in log.entries
        if item.action in ("enrolled", "renewed")
        for serial in item.detail["serials"]
    }
    for row in _rows(folder, "certificates"):
        if made.get(row["serial"]) != row["name"]:
            yield f"certificate {row['serial'][:16]} of {row['name']!r} was never issued"
