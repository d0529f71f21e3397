"""Everything that the silo's page shows of the state folder, read anew only where something has changed."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roundtable.client.agent.silo_log import ARCHIVES, NAME
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.maintenance import Maintenance
from roundtable.client.sharing.report_requests import ReportRequests
from roundtable.client.worker.own_budgets import OwnBudgets
from roundtable.core.errors import ConfigError
from roundtable.core.evidence.archive_shelf import ArchiveShelf
from roundtable.core.evidence.cross_check import receipts_of
from roundtable.core.identity.credentials import CA_CERTIFICATE, load_credentials
from roundtable.silo_page.asked_jobs import AskedJobs
from roundtable.silo_page.departures import Departures
from roundtable.silo_page.policy_sentences import sentences

PAGE_OF_DEPARTURES = 200
_AGAIN_SECONDS = 30.0
"""After so long everything is read anew: the hours of the policy go by."""


class ShownState:
    """For one page; every method blocks, and may be called by several threads."""

    def __init__(self, load: Callable[[], AgentConfig]) -> None:
        self._load = load
        self._config = load()
        self._departures = Departures(self._config.state)
        self._budgets = OwnBudgets(self._config)
        self._lock = threading.Lock()
        self._made: tuple[object, float, str, str] = (None, 0.0, "", "")

    def overview(self) -> tuple[str, str]:
        """All that is shown at first, as JSON, and a digest that changes with it."""
        with self._lock:
            stamp, now = self._stamp(), time.monotonic()
            known, since, digest, text = self._made
            if known != stamp or now - since > _AGAIN_SECONDS:
                text = json.dumps(self._values(), ensure_ascii=True, allow_nan=False)
                digest = hashlib.sha256(text.encode()).hexdigest()
                self._made = stamp, now, digest, text
            return digest, text

    def left(self, before: int) -> dict[str, Any]:
        """What left before an entry of the log (0: at all), the newest first."""
        with self._lock:
            self._departures.read()
            return {"departures": self._departures.newest(before, PAGE_OF_DEPARTURES)}

    def jobs(self) -> AskedJobs:
        """The jobs, under the rules as the file has them now."""
        return AskedJobs(self._load())

    def report(self, request: str) -> dict[str, Any]:
        """The very text that would be sent, and its digest."""
        found = self._requests().find(request)
        return {
            "request": found.wish.request,
            "report": found.digest,
            "text": found.report.read_text(encoding="utf-8"),
        }

    def answer_report(self, request: str, digest: str, approved: bool, reason: str) -> None:
        """Lets the report leave, or not. ConfigError where it is not the one that was shown."""
        found = self._requests().find(request)
        if found.digest != digest:
            raise ConfigError("the report has become another one since it was shown: look at it again")
        self._requests().answer(found, approved, reason)

    def drain(self, reason: str) -> None:
        """Takes no new round of any job."""
        Maintenance(self._config.state).drain(reason)

    def resume(self) -> None:
        """Takes part again."""
        Maintenance(self._config.state).resume()

    def verified(self) -> dict[str, Any]:
        """Whether the silo's own log holds together, and what of the receipts in it is proven.

        AuditError where an entry was changed, removed or moved.
        """
        authority = (self._config.credentials / CA_CERTIFICATE).read_bytes()
        path = self._config.state / NAME
        if not path.exists():
            return {"entries": 0, "signed": 0, "receipts": 0, "unsound": [], "absent": 0}
        archives = self._config.state / ARCHIVES
        shelf = ArchiveShelf([archives] if archives.is_dir() else [], authority, "agent")
        with path.open(encoding="utf-8", errors="replace") as lines:
            # A line that is being written now is not judged.
            log = shelf.read(line for line in lines if line.endswith("\n"))
        sound, unsound = receipts_of(log, authority)
        return {
            "entries": log.end,
            "signed": log.sealed,
            "receipts": len(sound),
            "unsound": sorted(unsound.values())[:20],
            "absent": len(log.absent),
        }

    def _values(self) -> dict[str, Any]:
        config = self._config = self._load()
        self._departures.read()
        drained = Maintenance(config.state).now()
        identity = load_credentials(config.credentials)
        budgets = [asdict(each) for each in self._budgets.now() if math.isfinite(each.epsilon)]
        return {
            "silo": identity.name,
            "expires": identity.expires.timestamp(),
            "coordinator": config.coordinator,
            "heard": self._departures.heard,
            "drained": asdict(drained) if drained else None,
            "approval": config.policy.approval,
            "jobs": AskedJobs(config).rows(),
            "requests": [_request(each) for each in self._requests().open_ones()],
            "budgets": budgets,
            "policy": sentences(config),
            "totals": self._departures.totals(),
            "archived": self._departures.archived,
        }

    def _requests(self) -> ReportRequests:
        return ReportRequests(self._config.state)

    def _stamp(self) -> object:
        state = self._config.state
        folders = [state / "jobs" / name for name in ("known", "asked", "approved", "refused")]
        files = [state / NAME, state / "maintenance.json", self._config.folder]
        return tuple(_stamps([*files, *folders, state / "reports", *(state / "privacy").glob("*.json")]))


def _stamps(paths: Iterable[Path]) -> Iterable[object]:
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        yield str(path), status.st_mtime_ns, status.st_size, status.st_ino


def _request(found: Any) -> dict[str, Any]:
    answer = found.answer
    return {
        "request": found.wish.request,
        "author": found.wish.author,
        "reason": found.wish.reason,
        "created": found.wish.created,
        "expires": found.wish.expires,
        "bytes": found.report.stat().st_size,
        "answer": None if answer is None else "approved" if answer.approved else "denied",
    }
