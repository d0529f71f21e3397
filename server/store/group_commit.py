"""Many small pieces of work in one transaction: a thousand agents that come at once wait for one sync."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.server.store.database import Database

Work = Callable[[Connection], Any]
Asked = TypeVar("Asked")
Found = TypeVar("Found")

MOST_TOGETHER = 500
"""What one transaction holds: others have their turn in between."""
ANSWERED_AT_ONCE = 8
"""Of those who asked together, how many go on before others have their turn in the event loop."""
RUSH, GATHERING = 10.0, 0.5
"""Above so many a second they gather for so many seconds."""


class Gathered(Generic[Asked, Found]):
    """What is asked during a transaction shares the next one.

    `run` is a database's `write` or `read`; `work` answers many at once, each in its place. In a rush
    transactions keep `GATHERING` seconds apart, so that their number does not grow with those who come.
    """

    def __init__(
        self,
        run: Callable[[Callable[[Connection], Sequence[Found]]], Awaitable[Sequence[Found]]],
        work: Callable[[Connection, Sequence[Asked]], Sequence[Found]],
    ) -> None:
        self._run = run
        self._work = work
        self._waiting: list[tuple[Asked, asyncio.Future[Found]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._rate = self._came = self._began = 0.0

    async def ask(self, asked: Asked) -> Found:
        """The answer; what was written is durable. StorageError if the shared transaction failed."""
        done: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, done))
        now = time.monotonic()
        self._rate = self._rate * math.exp(self._came - now) + 1.0
        self._came = now
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
        return await done

    async def _flush(self) -> None:
        while self._waiting:
            wait = self._began + GATHERING - time.monotonic()
            if self._rate > RUSH and wait > 0.0 and len(self._waiting) < MOST_TOGETHER:
                await asyncio.sleep(wait)
            self._began = time.monotonic()
            batch, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
            await self._answer(batch)

    async def _answer(self, batch: Sequence[tuple[Asked, asyncio.Future[Found]]]) -> None:
        found: Sequence[Found] = ()
        failed: StorageError | None = None
        asked = [each for each, _ in batch]
        try:
            found = await self._run(lambda connection: self._work(connection, asked))
        except StorageError as error:
            failed = error
        for place, (_, done) in enumerate(batch):
            if place and place % ANSWERED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if done.done():
                continue
            if failed is None:
                done.set_result(found[place])
            else:
                done.set_exception(failed)


class GroupedWrites:
    """Writes of many callers that share transactions: all of one are durable, or none."""

    def __init__(self, database: Database) -> None:
        self._writes: Gathered[Work, None] = Gathered(database.write, _all)

    async def write(self, work: Work) -> None:
        """Writes; durable when this returns. StorageError if the shared transaction failed."""
        await self._writes.ask(work)


def _all(connection: Connection, batch: Sequence[Work]) -> list[None]:
    for work in batch:
        work(connection)
    return [None] * len(batch)
