"""Tasks and timers of one job that run beside its driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from roundtable.core.errors import UnavailableError
from roundtable.server.store.database import LeaseLost

log = logging.getLogger("roundtable.server.jobs.background")


class BackgroundTasks:
    """Keeps tasks alive until they end, and logs those that fail."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs the work in a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancels everything that still runs."""
        for task in self._tasks:
            task.cancel()

    async def finished(self) -> None:
        """Waits for all that run now."""
        await asyncio.gather(*self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, (UnavailableError, LeaseLost)):
            # Its driver has ended, or will, and says why; the next one asks for what is outstanding.
            log.info("an action of the job was left: %s", error, extra={"job": self._job})
        else:
            log.error("an action of the job failed", exc_info=error, extra={"job": self._job})


class Timers:
    """The timers that the engine has set, by name. `ring` is called with the name of one that has run out."""

    def __init__(self, clock: Callable[[], float], ring: Callable[[str], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, at: float) -> None:
        """Sets a timer to a time of the clock; an older one of this name is dropped."""
        if (older := self._handles.pop(name, None)) is not None:
            older.cancel()
        delay = max(0.0, at - self._clock())
        self._handles[name] = asyncio.get_running_loop().call_later(delay, self._expired, name)

    def clear(self) -> None:
        """Drops all of them."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _expired(self, name: str) -> None:
        del self._handles[name]
        self._ring(name)
