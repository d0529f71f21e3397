"""Shares lines of the agent's log with the coordinator, as far as `[log_sharing]` of agent.toml lets it.

A line leaves only if it was logged as one that may (`shareable`), about a job that the silo takes part in. It
is in the silo's own log before it is sent, and is sent again until the coordinator has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from roundtable.client.door import outgoing
from roundtable.client.door.outgoing import FromAgent, LogLine
from roundtable.client.policy.sharing_tables import LogSharingTable
from roundtable.client.step_key import StepKey
from roundtable.core.config import JobConfig
from roundtable.core.errors import ResourceError
from roundtable.core.foreign_text import printable
from roundtable.core.observability.logs import LineKind, place_of
from roundtable.core.observability.released import Told

_log = logging.getLogger("roundtable.agent")
SHARED = "log_shared"
"""The action under which the silo's log keeps what was shared."""
LINE_CHARACTERS = 1000
_AT_ONCE = 200
_MOST_WAITING = 5000
_GATHER_SECONDS = 0.5
_AGAIN_SECONDS = 30.0
_JOBS_KEPT, _ROUNDS_KEPT = 200, 500


@dataclass
class _Used:
    lines: int = 0
    bytes: int = 0
    full: bool = False


class LineSharing(logging.Handler):
    """One for the life of an agent. `note` writes into the silo's own log."""

    def __init__(self, table: LogSharingTable, silo: str, note: Callable[..., None]) -> None:
        super().__init__(getattr(logging, table.level.upper()))
        self._table = table
        self._silo = silo
        self._note = note
        self._send: Callable[[FromAgent], None] = lambda _: None
        self._kinds: OrderedDict[str, frozenset[LineKind]] = OrderedDict()
        self._used: OrderedDict[tuple[str, int], _Used] = OrderedDict()
        self._fresh: list[LogLine] = []
        self._sent: dict[int, tuple[LogLine, ...]] = {}
        self._sent_at = 0.0
        self._number = 0
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def admit(self, job: str, config: JobConfig, task: str) -> None:
        """The silo takes part in this job, whose task has this name here."""
        if job not in self._kinds:
            self._kinds[job] = self._table.kinds_for(job, config, task)
            if len(self._kinds) > _JOBS_KEPT:
                self._kinds.popitem(last=False)

    async def run(self, send: Callable[[FromAgent], None]) -> None:
        """Shares lines as they come, until cancelled."""
        if not self._table.kinds:
            await asyncio.Event().wait()
        self._send, self._loop = send, asyncio.get_running_loop()
        _log.addHandler(self)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_SECONDS):
                        await self._news.wait()
                        # What is logged in a burst goes together.
                        await asyncio.sleep(_GATHER_SECONDS)
                self.share()
                if self._sent and time.monotonic() - self._sent_at > _AGAIN_SECONDS:
                    self.connected()
        finally:
            _log.removeHandler(self)

    def connected(self) -> None:
        """Sends what the coordinator has not said that it has: it may have been lost on the way."""
        for lines in self._sent.values():
            self._say(lines)

    def taken(self, number: int) -> None:
        """The coordinator wants no more of the lines that came together and ended with this one."""
        self._sent.pop(number, None)

    def share(self) -> None:
        """Notes what has come since the last time in the silo's log, and sends it."""
        self._news.clear()
        fresh, self._fresh = self._fresh, []
        for place in range(0, len(fresh), _AT_ONCE):
            lines = tuple(fresh[place : place + _AT_ONCE])
            try:
                for job in dict.fromkeys(line.step.job for line in lines):
                    said = [_noted(line) for line in lines if line.step.job == job]
                    self._note(self._silo, SHARED, job, lines=said)
            except ResourceError as error:
                _log.error("no line of the log is shared: %s", error)
                return
            self._sent[lines[-1].number] = lines
            self._say(lines)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        kind: LineKind | None = getattr(record, "shareable", None)
        place = place_of(record)
        if kind is None or self._loop is None or place["silo"] != self._silo:
            return
        if kind not in self._kinds.get(place["job"] or "", ()):
            return
        step = StepKey(place["job"], place["round"] or 0, place["attempt"] or 0, place["phase"] or "")
        level = logging.getLevelName(min(record.levelno, logging.ERROR)).lower()
        text = printable(record.getMessage(), LINE_CHARACTERS)
        with suppress(RuntimeError):
            # From whichever thread; the loop of an agent that has ended takes none.
            self._loop.call_soon_threadsafe(self._take, LogLine(0, record.created, step, level, kind, text))

    def _take(self, line: LogLine) -> None:
        """Queues a line, if its round has not shared as much as it may."""
        used = self._used.setdefault((line.step.job, line.step.round), _Used())
        if len(self._used) > _ROUNDS_KEPT:
            self._used.popitem(last=False)
        if used.full:
            return
        used.lines, used.bytes = used.lines + 1, used.bytes + len(line.text.encode())
        waiting = len(self._fresh) + sum(map(len, self._sent.values()))
        if used.lines > self._table.most_lines or used.bytes > self._table.most_bytes:
            used.full = True
            line = line.instead("further lines of this round stay at the silo ([log_sharing] bounds them)")
        elif waiting >= _MOST_WAITING:
            used.full = True
            line = line.instead("further lines of this round stay at the silo: too many wait to be sent")
        self._number = max(self._number + 1, time.time_ns() // 1000)
        self._fresh.append(line.numbered(self._number))
        self._news.set()

    def _say(self, lines: Sequence[LogLine]) -> None:
        self._sent_at = time.monotonic()
        self._send(outgoing.shared_lines(Told(lines)))


def _noted(line: LogLine) -> dict[str, Any]:
    """A line as the silo's log keeps it."""
    step = line.step
    return {
        "time": line.time,
        "round": step.round,
        "attempt": step.attempt,
        "phase": step.phase,
        "level": line.level,
        "kind": line.kind,
        "text": line.text,
    }
