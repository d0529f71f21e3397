"""What operators ask to know of this silo, and a person's answer: nothing of it leaves without one.

    reports/ID.wish.json      who asks and why, until when: written by the agent
    reports/ID.report.json    the very bytes that would be sent: written by the agent when it is asked
    reports/ID.answer.json    a person's yes or no: written by `roundtable client requests approve|deny`
    reports/ID.said           the silo's log has the answer, and it was sent
    reports/sent/ID.json      the newest that were sent

All of it holds over restarts. One request is open at a time; the coordinator asks again when the silo comes.
"""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundtable.client.door.incoming import ReportWish
from roundtable.client.durable_files import digest_of, explained, replace_synced
from roundtable.core.bounds import is_word
from roundtable.core.errors import ConfigError, ResourceError

MOST_REASON = 200
_SENT_KEPT = 20


@dataclass(frozen=True)
class ReportAnswer:
    """Whether the report with this BLAKE3 may be sent, who said so (an account of this machine), and when."""

    approved: bool
    digest: str
    by: str
    time: float
    reason: str = ""


@dataclass(frozen=True)
class ReportRequest:
    """What is known of a request: `answer` is None until a person, or the policy, has given one."""

    wish: ReportWish
    report: Path
    answer: ReportAnswer | None

    @property
    def digest(self) -> str:
        """BLAKE3 of what would be sent."""
        return digest_of(self.report)


class ReportRequests:
    """The folder, for the commands that read and answer, and for the agent."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "reports"

    def open_ones(self) -> Iterator[ReportRequest]:
        """Every request that is not over. ResourceError for files that cannot be read."""
        for file in sorted(self._folder.glob("*.wish.json")):
            found = self._read(file.name.removesuffix(".wish.json"))
            if found is not None:
                yield found

    def find(self, wanted: str) -> ReportRequest:
        """A request by its identifier or the beginning of one; ConfigError where it is not one."""
        matching = [each for each in self.open_ones() if each.wish.request.startswith(wanted)]
        if len(matching) != 1:
            raise ConfigError(f"{wanted!r} names no request; `roundtable client requests` lists them")
        return matching[0]

    def ask(self, wish: ReportWish, report: bytes) -> ReportRequest:
        """Keeps a request with what would be sent; both are durable when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = self._place(wish.request, "report.json")
        replace_synced(place, [report])
        replace_synced(self._place(wish.request, "wish.json"), [json.dumps(asdict(wish)).encode()])
        return ReportRequest(wish, place, None)

    def answer(self, request: ReportRequest, approved: bool, reason: str = "", by: str = "") -> ReportAnswer:
        """Says yes or no to what the request's report is now; the first answer holds.

        ConfigError for a reason that is too long or not printable, as operators are shown it, and for a
        second answer that differs.
        """
        if len(reason) > MOST_REASON or not reason.isprintable():
            raise ConfigError(f"--reason: at most {MOST_REASON} printable characters, on one line")
        if request.answer is not None:
            if request.answer.approved != approved:
                said = "approved" if request.answer.approved else "denied"
                raise ConfigError(f"request {request.wish.request} was {said} by {request.answer.by} already")
            return request.answer
        given = ReportAnswer(approved, request.digest, by or getpass.getuser(), time.time(), reason)
        replace_synced(self._place(request.wish.request, "answer.json"), [json.dumps(asdict(given)).encode()])
        return given

    def said(self, request: str) -> bool:
        """Whether the answer is in the silo's log, and was sent at least once."""
        return self._place(request, "said").exists()

    def note_said(self, request: str) -> None:
        """The answer is in the silo's log, and about to be sent."""
        replace_synced(self._place(request, "said"), [b""])

    def close(self, request: ReportRequest, *, sent: bool) -> None:
        """Forgets a request that is over; what was sent is kept, the newest of it."""
        folder, name = self._folder / "sent", request.wish.request
        try:
            if sent:
                folder.mkdir(exist_ok=True, mode=0o700)
                request.report.replace(folder / f"{name}.json")
                kept = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
                for file in kept[:-_SENT_KEPT]:
                    file.unlink(missing_ok=True)
            for ending in ("wish.json", "answer.json", "report.json", "said"):
                self._place(name, ending).unlink(missing_ok=True)
        except OSError as error:
            raise explained(error, self._folder) from error

    def _read(self, request: str) -> ReportRequest | None:
        wish, report = _json(self._place(request, "wish.json")), self._place(request, "report.json")
        answer = _json(self._place(request, "answer.json"))
        try:
            if wish is None or not report.exists():
                return None
            return ReportRequest(ReportWish(**wish), report, ReportAnswer(**answer) if answer else None)
        except TypeError as error:
            raise ResourceError(
                f"{self._folder}: request {request} was written by another version and cannot "
                "be read; delete it"
            ) from error

    def _place(self, request: str, ending: str) -> Path:
        if not is_word(request):
            raise ConfigError(f"{request[:80]!r} names no request: letters, digits and the signs _.:- do")
        return self._folder / f"{request}.{ending}"


def _json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ResourceError(f"{path} cannot be read: {error}; delete it") from error
    return values if isinstance(values, dict) else None
