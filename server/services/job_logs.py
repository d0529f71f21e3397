"""The log of each job for operators: the coordinator's own lines about it, and those that silos share.

What a job's level of privacy withholds from its history is withheld from its log by the same table: the
coordinator's lines about events say what the history says, and others are there only where nothing of the
cohort and of updates is withheld. What silos share their own policies decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from roundtable.core import bounds
from roundtable.core.errors import RoundtableError, StorageError, UnavailableError
from roundtable.core.foreign_text import printable
from roundtable.core.observability.logs import place_of
from roundtable.core.observability.released import Tells, is_told
from roundtable.core.privacy_table import NoPrivacy, Private
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.door.agent_messages import LinesShared, SiloLine
from roundtable.server.door.from_operators import LogWish
from roundtable.server.jobs.job_driver import parse_job
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.store import FINAL
from roundtable.server.store.job_lines import FreshLine, LineFilter, LineRow, insert_lines, lines_from
from roundtable.server.store.job_silo_rows import has_asked

log = logging.getLogger("roundtable.server.services.job_logs")

LINES_A_SECOND, LINES_AT_ONCE = 50.0, 5000.0
"""Of one silo; further ones are dropped."""
PAGE = 500
GATHER_SECONDS = 0.5
QUIET_SECONDS = 2.0
"""For so long the log of a job that is over is waited for: what silos say of its end is on its way."""
AWAY_SECONDS = 5.0
_MOST_WAITING = 5000
_LINE = 1000
_JOB_CHARACTERS = 32


@dataclass(frozen=True)
class _OwnLine:
    """A line of the coordinator's; `told` unless it is only for those who may know of cohort and updates."""

    line: FreshLine
    told: bool


class JobLogs(logging.Handler):
    """Keeps and shows them. One for a coordinator that is active."""

    def __init__(self, jobs: JobRegistry, services: JobServices) -> None:
        super().__init__(logging.INFO)
        self._jobs = jobs
        self._services = services
        self._rate = RateLimit(LINES_A_SECOND, LINES_AT_ONCE, time.monotonic)
        self._waiting: deque[_OwnLine] = deque(maxlen=_MOST_WAITING)
        self._number = 0
        self._logged = asyncio.Event()
        self._stored = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Stores the coordinator's own lines as they come, until cancelled."""
        ours = logging.getLogger("roundtable.server")
        ours.addHandler(self)
        try:
            while True:
                await self._logged.wait()
                # What is logged in a burst is stored together.
                await asyncio.sleep(GATHER_SECONDS)
                await self._store_own()
        finally:
            ours.removeHandler(self)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        place, told = place_of(record), getattr(record, "told", "")
        job = str(place["job"] or "")
        if not bounds.is_word(job) or len(job) > _JOB_CHARACTERS or told is None:
            return
        self._number = max(self._number + 1, time.time_ns() // 1000)
        line = FreshLine(
            job=job,
            silo="",
            number=self._number,
            time=record.created,
            level=logging.getLevelName(min(record.levelno, logging.ERROR)).lower(),
            round=_number(place["round"]),
            attempt=_number(place["attempt"]),
            phase=printable(place["phase"] or "", 100)[:100],
            kind="",
            text=printable(told or record.getMessage(), _LINE),
        )
        self._waiting.append(_OwnLine(line, bool(told)))
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._logged.set)

    async def take(self, silo: str, shared: LinesShared) -> str:
        """Stores what a silo shares. What is wrong with it, in words; then those lines are dropped.

        StorageError where nothing could be stored: the silo sends them again.
        """
        if self._rate.take(silo, len(shared.lines)):
            return f"{silo} shares more lines of its log than are kept: {len(shared.lines)} are dropped"
        problem, lines = "", list[FreshLine]()
        for job in dict.fromkeys(line.job for line in shared.lines):
            reason = await self._objection(job, silo)
            problem = problem or reason
            if not reason:
                lines += [_fresh(silo, line) for line in shared.lines if line.job == job]
        await self._store(lines)
        return problem

    async def read(self, job: str, wish: LogWish) -> AsyncIterator[list[LineRow]]:
        """Pages of a job's log; with `follow` also what comes until the job is over."""
        first, wanted = wish.first, LineFilter(wish.silo, wish.level, wish.round)
        while True:
            stored, row = self._stored, await self._jobs.row(job)
            lines = await self._services.database.read(
                partial(lines_from, job=job, sequence=first, wanted=wanted, limit=PAGE)
            )
            if lines:
                first = lines[-1].sequence + 1
                yield lines
            if len(lines) == PAGE:
                continue
            if not wish.follow:
                return
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await stored.wait()
            except TimeoutError:
                if row.status in FINAL:
                    return
            if self._jobs.stopping:
                raise UnavailableError("the coordinator is stopping; follow the job again once it is back")

    async def _store_own(self) -> None:
        self._logged.clear()
        fresh = [self._waiting.popleft() for _ in range(len(self._waiting))]
        open_jobs = {job: await self._tells_all(job) for job in {each.line.job for each in fresh}}
        try:
            await self._store([each.line for each in fresh if each.told or open_jobs[each.line.job]])
        except StorageError:
            # The job's driver says that the database is away; the newest of these lines wait for it.
            self._waiting.extendleft(reversed(fresh[: _MOST_WAITING - len(self._waiting)]))
            self._logged.set()
            await asyncio.sleep(AWAY_SECONDS)

    async def _store(self, lines: Sequence[FreshLine]) -> None:
        if not lines:
            return
        now = self._services.clock()
        await self._services.together.write(lambda connection: insert_lines(connection, lines, now))
        # Whoever waits looks anew, and waits for the next one.
        stored, self._stored = self._stored, asyncio.Event()
        stored.set()

    async def _objection(self, job: str, silo: str) -> str:
        """Why a silo's lines about a job are not kept; "" where they are."""
        if not await self._asked(job, silo):
            return f"{silo} shares lines about job {job}, which has asked it for nothing"
        if not await self._tells(job, Tells.COHORT):
            return f"{silo} shares lines about job {job}, whose cohorts are secret"
        return ""

    async def _asked(self, job: str, silo: str) -> bool:
        """Whether the job has ever drawn the silo."""
        if (runner := self._jobs.runner(job)) is not None:
            return runner.has_asked(silo)
        return await self._services.database.read(lambda connection: has_asked(connection, job, silo))

    async def _tells_all(self, job: str) -> bool:
        return await self._tells(job, Tells.COHORT, Tells.UPDATE)

    async def _tells(self, job: str, *kinds: Tells) -> bool:
        try:
            return is_told(await self._privacy(job), *kinds)
        except RoundtableError:
            # Not known for now: nothing is told.
            return False

    async def _privacy(self, job: str) -> NoPrivacy | Private:
        if (runner := self._jobs.runner(job)) is not None:
            return runner.job.privacy
        row = await self._jobs.row(job)
        return (await asyncio.to_thread(parse_job, row.config)).privacy


def _number(value: Any) -> int:
    """A round or an attempt of a log line, which may repeat what a silo wrote."""
    return min(max(0, int(value or 0)), bounds.MOST_ROUNDS - 1)


def _fresh(silo: str, line: SiloLine) -> FreshLine:
    return FreshLine(
        job=line.job,
        silo=silo,
        number=line.number,
        time=line.time,
        level=line.level,
        round=line.round,
        attempt=line.attempt,
        phase=line.phase,
        kind=line.kind,
        text=line.text,
    )
