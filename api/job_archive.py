"""A job in files of one's own: fetched into a folder, or as one archive that can be checked offline.

job.json               the configuration, as it was submitted
state.json             the job as it stood: status, rounds, submitter
rounds.jsonl           the committed rounds with their metrics, oldest first
events.jsonl           its history, once it is over
log.jsonl              the lines of its log that are kept, for who may read them, once it is over
model.safetensors      the newest model; model-initial the first, model-round-000007 that of a round, among
them the best where the job keeps it
provenance.json        the coordinator's signed statement of where the newest model comes from
manifest.json          BLAKE3 of all these: the archive's last member
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from blake3 import blake3

from roundtable.core.bounds import is_digest
from roundtable.core.errors import ConfigError, IdentityError, ProtocolError, RoundtableError
from roundtable.core.evidence.job_archive_check import (
    EVENTS,
    FIRST_MODEL,
    FORMAT,
    JOB,
    LOG,
    MANIFEST,
    MODEL,
    PROVENANCE,
    ROUNDS,
    STATE,
    round_model,
)
from roundtable.operator import OperatorClient
from roundtable.proto.operator_pb2 import JobDetail, JobLogLine

OVER = ("finished", "cancelled", "failed")
_ANY_SIZE = 1 << 62
Tell = Callable[[str], None]


@dataclass
class FetchedJob:
    """What was fetched: file name → BLAKE3; `not_kept` are models that the coordinator has no more.

    Without `log_told` the caller may not read the job's log.
    """

    job: str
    name: str
    status: str
    rounds: int
    rounds_told: int
    files: dict[str, str] = field(default_factory=dict)
    not_kept: list[str] = field(default_factory=list)
    log_told: bool = True


def download(
    operator: OperatorClient, wanted: str, folder: Path, all_models: bool = False, tell: Tell = lambda _: None
) -> FetchedJob:
    """Fetches a job into a folder. What lies there whole, with the right digest, is not fetched again.

    Names are ours alone, so that no word of a coordinator leads out of the folder. Raises TransferError where
    bytes do not have the digest that the coordinator states, ResourceError where they cannot be written.
    """
    detail = operator.job(wanted)
    records = [_record(text) for text in detail.history]
    job = detail.job
    found = FetchedJob(job.id, job.name, job.status, job.rounds_done, len(records))
    folder.mkdir(parents=True, exist_ok=True)
    _check_same(folder, job.id)
    texts = {
        JOB: detail.job_config,
        STATE: json.dumps(_state(detail), indent=1),
        ROUNDS: "".join(json.dumps(record) + "\n" for record in records),
    }
    if job.status in OVER:
        tell("its history")
        texts[EVENTS] = "".join(json.dumps(event) + "\n" for event in _events(operator, job.id))
        tell("its log")
        try:
            texts[LOG] = "".join(json.dumps(line) + "\n" for line in _lines(operator, job.id))
        except IdentityError as error:
            if not _has_code(error, grpc.StatusCode.PERMISSION_DENIED):
                raise
            found.log_told = False
    for name, text in texts.items():
        _write(folder, name, text, found)
    for name, digest in _models(detail, records, all_models).items():
        tell(name)
        _fetch(operator, digest, folder / name, found)
    return found


def archive(
    operator: OperatorClient,
    wanted: str,
    path: Path,
    scratch: Path,
    statement: Callable[[str], str],
    tell: Tell = lambda _: None,
) -> FetchedJob:
    """Writes a job that is over into one file, by way of the folder `scratch`; whole, or not there.

    `statement` fetches the signed statement of a job's newest model. ConfigError for a job that goes on.
    """
    if path.exists():
        raise ConfigError(f"{path} is there already: name another file")
    job = operator.job(wanted).job
    if job.status not in OVER:
        raise ConfigError(f"job {job.id} ({job.name}) is {job.status}: it is archived once it is over")
    found = download(operator, job.id, scratch, True, tell)
    if MODEL in found.files and found.rounds:
        _write(scratch, PROVENANCE, statement(found.job), found)
    manifest = {"format": FORMAT, "job": found.job, "files": found.files, "not_kept": found.not_kept}
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    partial = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(partial, "w") as tar:
            for name in [*sorted(found.files), MANIFEST]:
                tell(f"writing {name}")
                tar.add(scratch / name, name, recursive=False, filter=_anonymous)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return found


def _record(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
        if not isinstance(record["round"], int) or not is_digest(record["model"]):
            raise ValueError("it names no round or no model")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the coordinator sent a round's record that cannot be read: {error}") from error
    return dict(record)


def _state(detail: JobDetail) -> dict[str, Any]:
    job = detail.job
    return {
        "id": job.id,
        "name": job.name,
        "status": job.status,
        "reason": job.reason,
        "rounds": job.rounds,
        "rounds_done": job.rounds_done,
        "model": job.model.digest,
        "initial_model": detail.initial_model.digest,
        "submitter": job.submitter,
        "submitted": job.submitted,
        "updated": job.updated,
    }


def _check_same(folder: Path, job: str) -> None:
    """Keeps one job's files from getting among another's."""
    try:
        there = json.loads((folder / STATE).read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if there != job:
        raise ConfigError(f"{folder} holds job {str(there)[:64]!r} already: name another folder for {job}")


def _events(operator: OperatorClient, job: str) -> list[dict[str, Any]]:
    return [
        {
            "sequence": event.sequence,
            "time": event.time,
            "kind": event.kind,
            "round": event.round,
            "attempt": event.attempt,
            "client": event.client,
            "message": event.message,
            "detail": event.detail,
        }
        for update in operator.watch(job)
        for event in update.events
    ]


def _lines(operator: OperatorClient, job: str) -> list[dict[str, Any]]:
    names = [field.name for field in JobLogLine.DESCRIPTOR.fields]
    return [{name: getattr(line, name) for name in names} for line in operator.job_log(job)]


def _models(detail: JobDetail, records: list[dict[str, Any]], all_models: bool) -> dict[str, str]:
    """File name → digest."""
    wanted, best = {MODEL: detail.job.model.digest}, detail.job.best
    if detail.job.HasField("best") and best.round:
        wanted[round_model(best.round)] = best.model.digest
    if all_models:
        wanted[FIRST_MODEL] = detail.initial_model.digest
        wanted |= {round_model(record["round"]): record["model"] for record in records[:-1]}
    return wanted


def _write(folder: Path, name: str, text: str, found: FetchedJob) -> None:
    (folder / name).write_bytes(text.encode())
    found.files[name] = blake3(text.encode()).hexdigest()


def _fetch(operator: OperatorClient, digest: str, path: Path, found: FetchedJob) -> None:
    if not is_digest(digest):
        raise ProtocolError(f"the coordinator names a model {digest[:64]!r}, which is not a digest")
    if not (path.exists() and blake3().update_mmap(path).hexdigest() == digest):
        try:
            operator.get_artifact(digest, _ANY_SIZE, path)
        except RoundtableError as error:
            if not _has_code(error, grpc.StatusCode.NOT_FOUND):
                raise
            path.with_name(f"{path.name}.{digest[:12]}.partial").unlink(missing_ok=True)
            found.not_kept.append(path.name)
            return
    found.files[path.name] = digest


def _has_code(error: RoundtableError, code: grpc.StatusCode) -> bool:
    cause = error.__cause__
    return isinstance(cause, grpc.RpcError) and cause.code() is code


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o600
    return member
