"""A drill: restores a backup into a place of its own, looks at what came of it, and leaves nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.config import job_from_json
from roundtable.core.errors import AuditError, ResourceError, RoundtableError, StorageError
from roundtable.core.evidence.audit_log import Log, check_signed, read_log
from roundtable.core.identity.credentials import CA_CERTIFICATE
from roundtable.server.config import ServerConfig
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.backup_folder import BackupFolder
from roundtable.server.storage.backup_restore import restore
from roundtable.server.storage.sealing import BackupKey
from roundtable.server.store import Database, JobRow
from roundtable.server.store.artifacts import all_digests, mentioned
from roundtable.server.store.audit_archives import whole_log
from roundtable.server.store.jobs import jobs_in_order, unfinished_jobs
from roundtable.server.store.migrate import revision_of

_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Drill:
    """What was found sound. `made_at` and `opened_at` are the levels of the tables, there and restored."""

    created: float
    encrypted: bool
    made_at: str
    opened_at: str
    files: int
    rows: int
    artifacts: int
    artifact_bytes: int
    jobs: dict[str, int]
    audit_entries: int
    audit_signed: int
    signers: list[str]


def rehearse(
    config: ServerConfig,
    folder: Path,
    accept_ended: bool = False,
    *,
    key: BackupKey | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Drill:
    """Restores with the credentials of `config` and nothing else of it: into SQLite, below the folder
    that the system has for what is temporary.

    Raises what `restore` does, and StorageError for what is found wrong in what came of it.
    """
    with tempfile.TemporaryDirectory(prefix="roundtable-drill-") as name:
        place = Path(name)
        own = config.model_copy(
            update={
                "state": name,
                "database": f"sqlite:///{place / 'coordinator.db'}",
                "artifacts": str(place / "artifacts"),
                "bucket": "",
            }
        )
        backup = BackupFolder.open(folder, key)
        _check_space(backup, place)
        manifest = restore(own, folder, False, accept_ended, key=key, tell=tell)
        database = Database.open(own.database)
        try:
            return _looked_at(database, own, manifest, backup, tell)
        finally:
            database.close()


def _check_space(backup: BackupFolder, place: Path) -> None:
    needed = sum(path.stat().st_size for path in backup.path.rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free
    if needed + _SPARE_BYTES > free:
        raise ResourceError(
            f"the drill needs {needed:,} bytes in {place.parent}, which has {free:,}: name another folder "
            "with TMPDIR=/folder"
        )


def _looked_at(
    database: Database,
    config: ServerConfig,
    manifest: dict[str, Any],
    backup: BackupFolder,
    tell: Callable[[str], None],
) -> Drill:
    store = ArtifactStore(Path(config.artifacts), database.identity)
    with database.snapshot() as connection:
        opened = revision_of(connection)
        rows = sum(_same_rows(connection, backup, name) for name in manifest["files"])
        jobs = jobs_in_order(connection)
        _check_jobs(jobs)
        _check_goes_on(connection)
        digests = all_digests(connection)
        tell("reading the audit log")
        log = _audit_log(connection, store, (Path(config.credentials) / CA_CERTIFICATE).read_bytes())
    for number, digest in enumerate(digests):
        tell(f"hashing restored artifact {number + 1} of {len(digests)}")
        store.path(digest)
    return Drill(
        created=manifest["time"],
        encrypted=backup.cipher is not None,
        made_at=manifest["revision"],
        opened_at=str(opened),
        files=len(manifest["files"]),
        rows=rows,
        artifacts=len(digests),
        artifact_bytes=sum(store.size(digest) or 0 for digest in digests),
        jobs=dict(sorted(Counter(job.status for job in jobs).items())),
        audit_entries=len(log.entries),
        audit_signed=log.sealed,
        signers=sorted(log.signers),
    )


def _same_rows(connection: Connection, backup: BackupFolder, name: str) -> int:
    """The number of rows of a table, of which the restored database must have as many."""
    table = Path(name).stem
    wanted = sum(1 for _ in backup.lines(name))
    found = connection.execute(sa.select(sa.func.count()).select_from(sa.table(table))).scalar() or 0
    # The restore itself is an entry of the log, and signed.
    if found < wanted or (found > wanted and table not in ("audit", "seals")):
        raise StorageError(f"table {table} has {wanted} rows in the backup, and {found} restored")
    return wanted


def _check_jobs(jobs: list[JobRow]) -> None:
    for job in jobs:
        try:
            job_from_json(job.config)
        except (RoundtableError, ValueError) as error:
            raise StorageError(f"the configuration of job {job.id} cannot be read: {error}") from error


def _check_goes_on(connection: Connection) -> None:
    """Jobs that are not over must have the model that they go on from, and the best one that they keep."""
    for job in unfinished_jobs(connection):
        needed = sorted({job.model, job.initial_model, job.optimizer, job.best_model} - {""})
        if missing := set(needed) - mentioned(connection, needed):
            raise StorageError(
                f"job {job.id} cannot go on: {', '.join(sorted(missing))} is not in the backup"
            )


def _audit_log(connection: Connection, store: ArtifactStore, ca: bytes) -> Log:
    try:
        log = read_log(whole_log(connection, store.load), ca)
        check_signed(log)
    except AuditError as error:
        raise StorageError(f"the restored audit log does not hold: {error}") from error
    if log.sealed != log.end:
        raise StorageError(f"of {log.end} entries of the restored audit log {log.sealed} are signed")
    return log
