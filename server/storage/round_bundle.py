"""Writes what an auditor needs to make a job's models again (`engine/verification/bundle.py` reads it).

Who may run this may read the coordinator's database and artifacts, updates among them: nobody is shown
anything new. For jobs whose updates nobody else may read, or whose models could not be made again with them,
the bundle holds the signed log alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Connection

from roundtable.core.config import job_from_json
from roundtable.core.errors import StorageError
from roundtable.core.identity.credentials import SiloIdentity, load_silo_identity
from roundtable.core.identity.signing import envelope
from roundtable.engine.validation.repeatable import why_not_repeatable
from roundtable.engine.verification.bundle import JOB, LOG, OBJECTS, ROUNDS, object_path, round_path
from roundtable.server.config import ServerConfig
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.copies import (
    Vanished,
    copy_artifact,
    fetch_artifact,
    make_folders,
    stored_pieces,
)
from roundtable.server.store import Database, JobRow
from roundtable.server.store import audit as audit_store
from roundtable.server.store.artifacts import mentioned
from roundtable.server.store.audit_archives import whole_log
from roundtable.server.store.combined import combined_updates
from roundtable.server.store.jobs import find_job, history
from roundtable.server.store.rows import UpdateRow, to_json


@dataclass(frozen=True)
class Written:
    """A bundle that was written: of how many rounds, with how many artifacts; `missing` were not kept.

    `why_not` says why it holds the log alone.
    """

    job: str
    rounds: int
    artifacts: int
    missing: int
    why_not: str


def write_bundle(config: ServerConfig, wanted: str, folder: Path) -> Written:
    """Writes the bundle of a job (identifier, prefix or name) into `folder`, which must be empty or new.

    The coordinator may run meanwhile. Raises UnknownJob, IdentityError without an identity to sign the log,
    StorageError where the database cannot be read, ResourceError where the disk is full.
    """
    identity = load_silo_identity(Path(config.credentials))
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty: a bundle needs a folder of its own")
    database = Database.connect(config.database)
    try:
        make_folders(folder, folder / ROUNDS)
        with database.snapshot() as connection:
            row = find_job(connection, wanted, ("", ""))
            records = [json.loads(record) for record in history(connection, row.id)]
            why_not = why_not_repeatable(job_from_json(row.config))
            _write_lines(folder / LOG, _log(connection, identity, config))
            (folder / JOB).write_text(to_json(_job(row)), encoding="utf-8")
            digests = {row.initial_model}
            for record in () if why_not else records:
                updates = combined_updates(connection, row.id, record)
                place = round_path(folder, record["round"])
                place.write_text(to_json(_round(record, updates)), encoding="utf-8")
                digests |= {update.digest for update in updates} | {record["model"], record["optimizer"]}
            kept = set() if why_not else mentioned(connection, sorted(digests - {""}))
        found = _copy_all(config, folder, kept)
        return Written(row.id, len(records), found, len(digests - {""}) - found, why_not)
    finally:
        database.close()


def _job(row: JobRow) -> dict[str, Any]:
    signed = row.snapshot.get("signed", {})
    return {
        "id": row.id,
        "config": row.config,
        "submitter": row.submitter,
        "request_id": row.request_id,
        "initial_model": row.initial_model,
        "signature": row.snapshot.get("signature", ""),
        "certificate": row.snapshot.get("certificate", ""),
        "time": float(signed.get("time", 0.0)),
        "coordinator": signed.get("coordinator", ""),
        "population": int(row.snapshot["population"]),
    }


def _round(record: Mapping[str, Any], updates: list[UpdateRow]) -> dict[str, Any]:
    return {
        "round": record["round"],
        "population": record["population"],
        "updates": [
            {
                "client": update.client,
                "round": update.round,
                "attempt": update.attempt,
                "digest": update.digest,
                "examples": update.examples,
                "loss": update.loss,
                "statement": json.loads(update.statement) if update.statement else None,
            }
            for update in updates
        ],
        "weights": record["weights"],
    }


def _log(connection: Connection, identity: SiloIdentity, config: ServerConfig) -> Iterator[str]:
    """The whole audit log with its seals, and one more under its end: the database stays as it is."""

    def load(digest: str) -> bytes:
        try:
            return b"".join(stored_pieces(config, digest))
        except Vanished:
            raise StorageError(f"artifact {digest}, an archive of the audit log, is missing") from None

    yield from whole_log(connection, load)
    sequence, digest = audit_store.end(connection)
    if sequence:
        values = {"sequence": sequence, "hash": digest, "time": time.time()}
        yield to_json({"seal": envelope(identity, "seal", values)})


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")


def _copy_all(config: ServerConfig, folder: Path, digests: set[str]) -> int:
    """Copies what is there; returns how many. What retention deletes meanwhile counts as not kept."""
    bucket = Bucket(config.bucket) if config.bucket else None
    count = 0
    for digest in sorted(digests):
        try:
            if bucket is None:
                copy_artifact(Path(config.artifacts) / OBJECTS, folder / OBJECTS, digest)
            else:
                fetch_artifact(bucket, object_path(folder, digest))
        except Vanished:
            continue
        count += 1
    return count
