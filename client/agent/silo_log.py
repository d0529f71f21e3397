"""Writes the silo's own log: what it was asked, sent, got a receipt for, and refused.

`audit.jsonl` in the state folder has the form of the coordinator's audit log (`core/evidence/audit_log.py`),
so that `roundtable audit cross-check` can lay the two side by side. The coordinator's receipts are kept with
their signature: it cannot deny later what it acknowledged.

Entries that are old enough leave it for `archives/` beside it (`core/evidence/audit_archive.py`): the archive
is written and read back, then the log is replaced by one that has its statement in their place. Nothing is
decided by this log: what keeps a step from being done twice (releases.jsonl, accounts, known jobs) stays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roundtable.client.agent.connection import Backoff
from roundtable.client.durable_files import append_synced, replace_synced
from roundtable.client.training.metrics import Metrics
from roundtable.core.errors import IdentityError, ResourceError, RoundtableError
from roundtable.core.evidence.archive_shelf import write_archive
from roundtable.core.evidence.audit_archive import (
    LinesDigest,
    LogArchive,
    named_archive,
    statement_line,
    unpack,
)
from roundtable.core.evidence.audit_log import AuditEntry, entry
from roundtable.core.identity.credentials import SiloIdentity, load_silo_identity
from roundtable.core.identity.signing import envelope

_ENTRY, _STATEMENT = '{"entry"', '{"archive"'
_log = logging.getLogger("roundtable.agent")
NAME = "audit.jsonl"
ARCHIVES = "archives"
_SEAL_EVERY = 20
_ASKED_FOR = 20
_DAY_SECONDS = 86400.0
_GATHERED_DAYS = 30.0
_DISK_SECONDS = 5.0
"""How long at most between two tries to write the log."""
"""An archive is begun once its first entry is so much older than it must be."""


async def until_written(note: Callable[[], None], troubled: Callable[[ResourceError], None]) -> None:
    """Writes into the silo's log, however long its disk is full; `troubled` is told of the first error."""
    backoff, told = Backoff(limit=_DISK_SECONDS), False
    while True:
        try:
            return note()
        except ResourceError as error:
            if not told:
                troubled(error)
            told = True
        await asyncio.sleep(backoff.next())


class Notes:
    """Notes of one kind, written one after the other beside other work, however long the disk is full."""

    def __init__(self) -> None:
        self._writing: asyncio.Task[None] | None = None

    def add(self, note: Callable[[], None]) -> None:
        """Writes it once those before it are written."""
        self._writing = asyncio.create_task(self._write(self._writing, note))

    def close(self) -> None:
        """Gives up what could not be written."""
        if self._writing is not None:
            self._writing.cancel()

    @staticmethod
    async def _write(before: asyncio.Task[None] | None, note: Callable[[], None]) -> None:
        if before is not None:
            await before
        await until_written(note, lambda error: _log.error("noted once that can be: %s", error))


class SiloLog:
    """Appends lines; each is on disk when `note` returns. Signed every twenty entries, and at the end.

    Entries older than `days` are archived when the log is signed; 0: none are. IdentityError where there is
    nothing to sign archives with.
    """

    def __init__(self, path: Path, credentials: Path, days: float = 0.0) -> None:
        self._path = path
        self._credentials = credentials
        self._days = days
        if days:
            load_silo_identity(credentials)
        self._begins, self._last, self._sealed = _ends(path)

    def note(self, actor: str, action: str, target: str = "", **detail: Any) -> None:
        """Appends one entry; ResourceError where the log cannot be written."""
        made = entry(time.time(), actor, action, target, detail).after(self._last)
        self._append(made.to_line())
        self._begins = self._begins or made
        self._last = made
        if made.sequence - self._sealed >= _SEAL_EVERY:
            self.seal()

    def unanswered(self) -> list[tuple[Any, ...]]:
        """(job, round, attempt, digest, bytes) of the newest updates that were sent and have no receipt here.

        Archives are not read: what they tell of is too old for a receipt to be had.
        """
        sent: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            if not any(f'"action":"{action}"' in line for action in ("sent", "receipt", "region_receipt")):
                continue
            found = json.loads(line)["entry"]
            detail, is_sent = found["detail"], found["action"] == "sent"
            key = tuple(detail[name] for name in ("job", "round", "attempt", "update"))
            if not is_sent:
                sent.pop(key, None)
            elif "size" in detail:
                sent[key] = (*key, detail["size"])
        return list(sent.values())[-_ASKED_FOR:]

    def seal(self) -> None:
        """Signs the log up to its end with the silo's identity; without one it is only chained.

        Where the disk is full the next entry's turn signs it: what was noted is written, and stays so.
        """
        if self._last is None or self._last.sequence == self._sealed:
            return
        try:
            identity = load_silo_identity(self._credentials)
        except IdentityError as error:
            _log.debug("the silo's log is not signed: %s", error)
            return
        values = {"sequence": self._last.sequence, "hash": self._last.hash, "time": time.time()}
        document = json.dumps(envelope(identity, "seal", values), separators=(",", ":"))
        try:
            self._append(f'{{"seal":{document}}}')
        except ResourceError as error:
            _log.warning("the silo's log is not signed up to its end yet: %s", error)
            return
        self._sealed = self._last.sequence
        self._archive_what_is_due(identity)

    def _archive_what_is_due(self, identity: SiloIdentity) -> None:
        before = time.time() - self._days * _DAY_SECONDS
        begins = self._begins.time if self._begins else before
        if not self._days or begins > before - _GATHERED_DAYS * _DAY_SECONDS:
            return
        try:
            self._archive(identity, before)
        except RoundtableError as error:
            _log.error("the silo's log is not archived for now: %s", error)

    def _archive(self, identity: SiloIdentity, before: float) -> None:
        """Moves all entries from before a time into an archive, up to one that is sealed and not the last."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        body = next(place for place, line in enumerate(lines) if not line.startswith(_STATEMENT))
        cut = _cut(lines[body:], before)
        if not cut:
            return
        gone = lines[body : body + cut]
        entries = [AuditEntry(**json.loads(line)["entry"]) for line in gone if line.startswith(_ENTRY)]
        digest = LinesDigest()
        for line in gone:
            digest.add(line)
        first, last = entries[0], entries[-1]
        archive = LogArchive(first.sequence, last.sequence, first.previous, last.hash, digest.hex())
        statement = statement_line(archive.signed(identity, time.time()))
        folder = self._path.parent / ARCHIVES
        _clear(folder, entries, lines)
        write_archive(folder / archive.name, [*gone, statement])
        if list(unpack(folder / archive.name)) != [*gone, statement]:
            raise ResourceError(f"{archive.name} does not hold what was written into it")
        left = [*lines[:body], statement, *lines[body + cut :]]
        replace_synced(self._path, [f"{line}\n".encode() for line in left])
        self._path.chmod(0o600)
        self._begins = _ends(self._path)[0]
        _log.info("archived entries %d to %d of the silo's log", archive.first, archive.last)

    def _append(self, line: str) -> None:
        try:
            self._path.touch(mode=0o600)
            append_synced(self._path, line.encode() + b"\n")
        except (OSError, ResourceError) as error:
            raise ResourceError(
                f"the silo's log cannot be written, and nothing is done without it: {error}"
            ) from error


def _cut(lines: list[str], before: float) -> int:
    """How many lines go: all of them from before a time, the last one a seal with a later entry behind it."""
    cut = place = 0
    for place, line in enumerate(lines):
        if line.startswith(_ENTRY):
            cut = place if place and not lines[place - 1].startswith(_ENTRY) else cut
            if json.loads(line)["entry"]["time"] >= before:
                return cut
    return cut


def _clear(folder: Path, gone: list[AuditEntry], lines: list[str]) -> None:
    """Deletes an archive that was written before a crash: its entries are all still in the log.

    ResourceError where they are not: then it is another log's, or this one was put back from a backup.
    """
    hashes = {json.loads(line)["entry"]["hash"] for line in lines if line.startswith(_ENTRY)}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = named_archive(path.name)
        if found is None or found[1] < gone[0].sequence:
            continue
        held = [json.loads(line)["entry"]["hash"] for line in unpack(path) if line.startswith(_ENTRY)]
        if not hashes.issuperset(held):
            raise ResourceError(
                f"{path} holds entries that the log has not: keep both for whoever looks into it, and move "
                "it away"
            )
        path.unlink()


def _ends(path: Path) -> tuple[AuditEntry | None, AuditEntry | None, int]:
    """The first and the last entry of a log and the number of the last one that is sealed.

    A last line that a power cut left half written is cut off; the chain itself is for `audit verify`.
    """
    first: AuditEntry | None = None
    last, sealed = None, 0
    if not path.exists():
        return None, None, 0
    whole = path.read_bytes()
    if whole and not whole.endswith(b"\n"):
        whole = whole[: whole.rfind(b"\n") + 1]
        os.truncate(path, len(whole))
    for line in whole.splitlines():
        try:
            document = json.loads(line)
            if "entry" in document:
                last = AuditEntry(**document["entry"])
                first = first or last
            elif "archive" in document:
                sealed = int(document["archive"]["statement"]["last"])
            else:
                sealed = int(document["seal"]["statement"]["sequence"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ResourceError(
                f"the silo's log {path} is damaged: keep it for whoever looks into it, and move it away"
            ) from error
    return first, last, sealed


def noted_sums(metrics: Metrics) -> dict[str, list[float | str]]:
    """Sums and counts as the log keeps them; what is not finite as text, which JSON can say."""
    return {
        name: [total if math.isfinite(total) else str(total), count]
        for name, (total, count) in metrics.items()
    }
