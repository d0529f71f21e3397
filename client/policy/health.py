"""Checks of the silo's own: commands and functions that say whether it is ready for work.

Each gets one JSON object, `{"check", "silo", "job", "task"}`, the last two empty between steps, and answers
with one, `{"ready": true}` or `{"ready": false, "reason": "..."}`. Whatever else it does, it has failed: what
it wrote is in the silo's own log alone, and operators are told its name and the reason that it gave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from roundtable.client.policy.health_table import HealthTable
from roundtable.core.bounds import one_line
from roundtable.core.hooks.hook_command import ask_command
from roundtable.core.plugins.doors import described, resolve

_log = logging.getLogger("roundtable.agent")
ENTRY_POINT_GROUP = "roundtable.health_checks"
MOST_REASON = 150
STEADY_SECONDS = 720.0
"""Once it is not ready a silo is so for so long at least: operators are told of ten changes an hour."""

Function = Callable[[Mapping[str, str]], Any]


class HealthChecks:
    """The silo's checks, and what each said last."""

    def __init__(self, tables: Sequence[HealthTable], silo: str) -> None:
        """Raises ConfigError for an entry point that is not installed."""
        self._tables = tuple(tables)
        self._silo = silo
        self._functions: dict[str, Function] = {
            table.name: resolve("health check", table.entry, {}, ENTRY_POINT_GROUP)
            for table in self._tables
            if table.entry
        }
        self._failing: dict[str, str] = {}
        self._running: dict[str, asyncio.Future[Any]] = {}
        self._news = asyncio.Event()
        self._unready = ""
        self._since = 0.0

    async def before(self, job: str, task: str) -> str:
        """Why the silo cannot work on a step; "" where it can."""
        tables = [table for table in self._tables if table.before_work]
        await asyncio.gather(*(self._look(table, job, task) for table in tables))
        return self._first({table.name for table in tables})

    async def watch(self, changed: Callable[[str], None]) -> None:
        """Runs each check as its table says; tells why the silo is not ready, "" when it is again."""
        loops = [asyncio.create_task(self._repeat(table)) for table in self._tables]
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                self._tell(changed)
        finally:
            for task in loops:
                task.cancel()

    def _tell(self, changed: Callable[[str], None]) -> None:
        loop, reason = asyncio.get_running_loop(), self._first()
        if reason and not self._unready:
            self._unready, self._since = reason, loop.time()
            changed(reason)
        elif not reason and self._unready:
            left = self._since + STEADY_SECONDS - loop.time()
            if left > 0:
                loop.call_later(left, self._news.set)
                return
            self._unready = ""
            changed("")

    def _first(self, names: set[str] | None = None) -> str:
        failing = (f"{n}: {why}" for n, why in self._failing.items() if names is None or n in names)
        return next(failing, "")

    async def _repeat(self, table: HealthTable) -> None:
        while True:
            await self._look(table, "", "")
            await asyncio.sleep(table.every)

    async def _look(self, table: HealthTable, job: str, task: str) -> None:
        inquiry = {"check": table.name, "silo": self._silo, "job": job, "task": task}
        try:
            async with asyncio.timeout(table.timeout):
                answer = await self._ask(table, inquiry)
            reason = reason_of(answer)
        except TimeoutError:
            reason = f"no answer within {table.timeout:g} s"
        except Exception as error:  # noqa: BLE001 - it is the silo's own code, and whatever it raises is a failure
            _log.warning("the health check %s failed: %s", table.name, described(error))
            reason = "the check itself failed; the silo's log says how"
        before = self._failing.pop(table.name, "")
        if reason:
            self._failing[table.name] = reason
        if reason != before:
            _log.log(
                logging.WARNING if reason else logging.INFO,
                "health check %s: %s",
                table.name,
                reason or "passes again",
            )
        self._news.set()

    async def _ask(self, table: HealthTable, inquiry: Mapping[str, str]) -> Any:
        if table.command:
            return await ask_command(table.command, inquiry)
        running = self._running.get(table.name)
        if running is None or running.done():
            # A thread cannot be ended: while one hangs, all who ask wait for that one.
            call = partial(self._functions[table.name], inquiry)
            running = self._running[table.name] = asyncio.get_running_loop().run_in_executor(None, call)
        return await asyncio.shield(running)


def reason_of(answer: Any) -> str:
    """Why the silo is not ready, in a line that operators may read; "" where it is."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("ready"), bool):
        return 'it did not answer {"ready": true} or {"ready": false, "reason": "..."}'
    if answer["ready"]:
        return ""
    reason = answer.get("reason", "")
    return one_line(reason if isinstance(reason, str) else "", MOST_REASON) or "no reason given"
