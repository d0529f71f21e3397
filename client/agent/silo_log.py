"""Writes the silo's own log: what it was asked, sent, got a receipt for, and refused.

`audit.jsonl` in the state folder has the form of the coordinator's audit log (`core/evidence/audit_log.py`),
so that `roundtable audit cross-check` can lay the two side by side. The coordinator's receipts are kept with
their signature: it cannot deny later what it acknowledged.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from roundtable.client.durable_files import append_synced
from roundtable.core.errors import IdentityError, ResourceError
from roundtable.core.evidence.audit_log import AuditEntry, entry
from roundtable.core.identity.credentials import load_silo_identity
from roundtable.core.identity.signing import envelope

_log = logging.getLogger("roundtable.agent")
NAME = "audit.jsonl"
_SEAL_EVERY = 20


class SiloLog:
    """Appends lines; each is on disk when `note` returns. Signed every twenty entries, and at the end."""

    def __init__(self, path: Path, credentials: Path) -> None:
        self._path = path
        self._credentials = credentials
        self._last, self._sealed = _tail(path)

    def note(self, actor: str, action: str, target: str = "", **detail: Any) -> None:
        """Appends one entry; ResourceError where the log cannot be written."""
        made = entry(time.time(), actor, action, target, detail).after(self._last)
        self._append(made.to_line())
        self._last = made
        if made.sequence - self._sealed >= _SEAL_EVERY:
            self.seal()

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

    def _append(self, line: str) -> None:
        try:
            self._path.touch(mode=0o600)
            append_synced(self._path, line.encode() + b"\n")
        except (OSError, ResourceError) as error:
            raise ResourceError(
                f"the silo's log cannot be written, and nothing is done without it: {error}"
            ) from error


def _tail(path: Path) -> tuple[AuditEntry | None, int]:
    """The last entry of a log and the number of the last one that is sealed.

    A last line that a power cut left half written is cut off; the chain itself is for `audit verify`.
    """
    last, sealed = None, 0
    if not path.exists():
        return None, 0
    whole = path.read_bytes()
    if whole and not whole.endswith(b"\n"):
        whole = whole[: whole.rfind(b"\n") + 1]
        os.truncate(path, len(whole))
    for line in whole.splitlines():
        try:
            document = json.loads(line)
            if "entry" in document:
                last = AuditEntry(**document["entry"])
            else:
                sealed = int(document["seal"]["statement"]["sequence"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ResourceError(
                f"the silo's log {path} is damaged: keep it for whoever looks into it, and move it away"
            ) from error
    return last, sealed
