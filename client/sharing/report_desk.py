"""The agent's side of reports that operators ask for: made when they ask, sent when a person has said yes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from roundtable.client.door import outgoing
from roundtable.client.door.incoming import ReportTaken, ReportWish
from roundtable.client.door.outgoing import FromAgent
from roundtable.client.policy.sharing_tables import DiagnosticsTable
from roundtable.client.sharing.report_requests import ReportAnswer, ReportRequest, ReportRequests
from roundtable.client.sharing.silo_report import RecentLines
from roundtable.core.errors import ResourceError
from roundtable.core.foreign_text import printable

_log = logging.getLogger("roundtable.agent")
POLICY = "[diagnostics] reports"
"""Who says yes or no where the silo's file does."""
_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 30.0
_MOST_AN_HOUR = 10


class ReportDesk:
    """One for the life of an agent. `note` writes into the silo's own log; `make` may take a minute."""

    def __init__(
        self,
        state: Path,
        table: DiagnosticsTable,
        lines: RecentLines,
        note: Callable[..., None],
        make: Callable[[ReportWish], bytes],
    ) -> None:
        self._files = ReportRequests(state)
        self._table = table
        self._lines = lines
        self._note = note
        self._make = make
        self._send: Callable[[FromAgent], None] = lambda _: None
        self._wishes: deque[ReportWish] = deque(maxlen=_MOST_AN_HOUR)
        self._taken: list[str] = []
        self._asked: deque[float] = deque(maxlen=_MOST_AN_HOUR)
        self._said_at: dict[str, float] = {}
        self._news = asyncio.Event()
        self._complaint = ""

    def hear(self, message: ReportWish | ReportTaken) -> None:
        """The coordinator asks, or has what it asked for."""
        if isinstance(message, ReportWish):
            self._wishes.append(message)
        else:
            self._taken.append(message.request)
        self._news.set()

    async def run(self, send: Callable[[FromAgent], None]) -> None:
        """Answers until cancelled; looks at the folder for what a person has said."""
        self._send = send
        _log.addHandler(self._lines)
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _LOOK_SECONDS)
                self._news.clear()
                try:
                    await self._look()
                    self._complaint = ""
                except ResourceError as error:
                    if str(error) != self._complaint:
                        self._complaint = str(error)
                        _log.error("reports to operators: %s", error)
        finally:
            _log.removeHandler(self._lines)

    async def _look(self) -> None:
        taken, self._taken = set(self._taken), []
        for request in list(self._files.open_ones()):
            if request.wish.request in taken:
                self._files.close(request, sent=request.answer is not None and request.answer.approved)
            else:
                self._go_on(request)
        while self._wishes:
            await self._receive(self._wishes.popleft())

    async def _receive(self, wish: ReportWish) -> None:
        for request in list(self._files.open_ones()):
            if request.wish.request == wish.request:
                self._said_at.pop(wish.request, None)
                if request.answer is None:
                    self._send(outgoing.report(wish.request, "shown"))
                return
        now = time.time()
        often = len(self._asked) == _MOST_AN_HOUR and now - self._asked[0] < 3600
        if wish.expires <= now or often:
            _log.warning("a request for a report is left: it has expired, or there were too many in an hour")
            return
        self._asked.append(now)
        detail = {"author": wish.author, "reason": wish.reason}
        if self._table.reports == "never":
            self._note(POLICY, "report_denied", wish.request, **detail)
            self._send(outgoing.report(wish.request, "denied", "the silo's settings allow no reports"))
            return
        report = await asyncio.to_thread(self._make, wish)
        for older in list(self._files.open_ones()):
            # The coordinator has one open at a time: it has given that one up.
            self._files.close(older, sent=False)
        request = self._files.ask(wish, report)
        self._note("coordinator", "report_requested", wish.request, report=request.digest, **detail)
        _log.warning(
            "%s asks for a report of this silo (%s): `roundtable client requests` shows what would be sent",
            wish.author,
            wish.reason or "no reason given",
        )
        self._send(outgoing.report(wish.request, "shown"))
        if self._table.reports == "always":
            self._files.answer(request, True, by=POLICY)
            self._news.set()

    def _go_on(self, request: ReportRequest) -> None:
        """Sends the answer once there is one, and again until the coordinator has it."""
        name, answer = request.wish.request, request.answer
        if request.wish.expires <= time.time():
            self._note("coordinator", "report_expired", name)
            self._files.close(request, sent=False)
        elif (
            answer is not None
            and time.monotonic() - self._said_at.get(name, -_AGAIN_SECONDS) >= _AGAIN_SECONDS
        ):
            if answer.approved and answer.digest != request.digest:
                raise ResourceError(
                    f"the report of request {name} is not the one that {answer.by} has approved"
                )
            self._say(request, answer)

    def _say(self, request: ReportRequest, answer: ReportAnswer) -> None:
        name, report = request.wish.request, request.report.read_bytes() if answer.approved else b""
        if not self._files.said(name):
            action = "report_sent" if answer.approved else "report_denied"
            detail = {"report": answer.digest, "bytes": len(report), "reason": answer.reason}
            self._note(printable(answer.by, 100), action, name, **detail)
            self._files.note_said(name)
        self._said_at[name] = time.monotonic()
        self._send(outgoing.report(name, "sent" if answer.approved else "denied", answer.reason, report))
