"""Checks a job's archive offline, without unpacking it: digests, models, the coordinator's statement."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.identity.signing import Signed, job_digest, open_envelope

JOB, STATE, ROUNDS, EVENTS = "job.json", "state.json", "rounds.jsonl", "events.jsonl"
LOG = "log.jsonl"
MODEL, FIRST_MODEL = "model.safetensors", "model-initial.safetensors"
PROVENANCE, MANIFEST = "provenance.json", "manifest.json"
FORMAT = 1
_MOST_BYTES = 256 << 20
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class CheckedArchive:
    """What an archive was found to hold; `signer` has signed for its newest model, empty where it has none.

    `ends` is when the certificate of that signature ends.
    """

    job: str
    name: str
    status: str
    rounds: int
    models: int
    files: int
    not_kept: int
    signer: str
    ends: float


def round_model(number: int) -> str:
    """The file of a round's model."""
    return f"model-round-{number:06d}.safetensors"


def check_archive(path: Path, ca: bytes) -> CheckedArchive:
    """Reads an archive through: every digest, the models that its rounds name, the signed statement.

    AuditError names what does not hold.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            digests, texts = _read_through(path, tar)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise AuditError(f"{path} is not a whole archive of a job: {error}") from error
    try:
        manifest = json.loads(texts[MANIFEST])
        if manifest["format"] != FORMAT:
            raise AuditError(f"{path} has format {manifest['format']!r}, this version knows {FORMAT}")
        _check_digests(path, digests, manifest["files"])
        state = json.loads(texts[STATE])
        records = [json.loads(line) for line in texts[ROUNDS].splitlines()]
        models = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
        _check_models(path, models, records, state)
        signed = _statement(path, texts, ca)
        if signed is None and records and MODEL in models:
            raise AuditError(f"{path} holds a model and no signed statement of it")
        if signed is not None:
            _check_signed(path, signed, texts, models, records, state)
        return CheckedArchive(
            job=str(state["id"]),
            name=str(state["name"]),
            status=str(state["status"]),
            rounds=int(state["rounds_done"]),
            models=len(models),
            files=len(digests),
            not_kept=len(manifest["not_kept"]),
            signer=signed.signer if signed else "",
            ends=signed.ends if signed else 0.0,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise AuditError(f"{path} is not an archive of a job: {type(error).__name__} {error}") from error


def _read_through(path: Path, tar: tarfile.TarFile) -> tuple[dict[str, str], dict[str, str]]:
    """The digest of each member but the manifest, and the texts."""
    digests: dict[str, str] = {}
    texts: dict[str, str] = {}
    for member in tar:
        file = tar.extractfile(member) if member.isreg() else None
        if file is None or member.name in digests or member.name in texts:
            raise AuditError(f"{path} holds {member.name[:80]!r}, which is not a file of its own")
        is_text = not member.name.endswith(".safetensors")
        if is_text and member.size > _MOST_BYTES:
            raise AuditError(f"{path}: {member.name[:80]!r} has {member.size} bytes; {_MOST_BYTES} at most")
        digest, data = _hashed(file, is_text)
        if is_text:
            texts[member.name] = data.decode("utf-8", errors="replace")
        if member.name != MANIFEST:
            digests[member.name] = digest
    return digests, texts


def _hashed(file: IO[bytes], keep: bool) -> tuple[str, bytes]:
    hasher, kept = blake3(), bytearray()
    while data := file.read(_READ_BYTES):
        hasher.update(data)
        if keep:
            kept += data
    return hasher.hexdigest(), bytes(kept)


def _check_digests(path: Path, found: Mapping[str, str], stated: Mapping[str, str]) -> None:
    for name in sorted({*found, *stated}):
        if found.get(name) != stated.get(name):
            what = "is missing" if name not in found else "was added" if name not in stated else "was changed"
            raise AuditError(f"{path}: {name[:80]!r} {what}")


def _check_models(
    path: Path, models: Mapping[str, str], records: list[dict[str, Any]], state: Mapping[str, Any]
) -> None:
    """Each model must be the one that its round, or the job, names."""
    named = {round_model(record["round"]): record["model"] for record in records}
    named |= {MODEL: state["model"], FIRST_MODEL: state["initial_model"]}
    for name, digest in models.items():
        if named.get(name) != digest:
            raise AuditError(f"{path}: {name[:80]!r} is not the model that the job's rounds name")


def _statement(path: Path, texts: Mapping[str, str], ca: bytes) -> Signed | None:
    if PROVENANCE not in texts:
        return None
    try:
        return open_envelope(json.loads(texts[PROVENANCE]), ca, "coordinator", "provenance")
    except IdentityError as error:
        raise AuditError(f"{path}: {PROVENANCE} proves nothing: {error}") from error


def _check_signed(
    path: Path,
    signed: Signed,
    texts: Mapping[str, str],
    models: Mapping[str, str],
    records: list[dict[str, Any]],
    state: Mapping[str, Any],
) -> None:
    """What the coordinator has signed for must be what the archive holds, whatever its manifest says."""
    values = signed.values
    rounds = {one["round"]: one["model"] for one in values["rounds"]}
    holds = {
        "job": values["job"] == state["id"],
        "configuration": values["config"] == job_digest(texts[JOB]),
        "model": values["model"] == models.get(MODEL),
        "initial model": values["initial_model"] == state["initial_model"],
        "rounds": all(rounds.get(record["round"]) == record["model"] for record in records),
    }
    if differing := [name for name, is_so in holds.items() if not is_so]:
        raise AuditError(f"{path} differs from what {signed.signer} has signed: {', '.join(differing)}")
