"""Many small writes in one transaction: a thousand agents that connect at once wait for one sync only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.server.store.database import Database

Work = Callable[[Connection], Any]


class GroupedWrites:
    """Lets writes that come during a transaction share the next one: all of them are durable, or none."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Work, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def write(self, work: Work) -> None:
        """Writes; durable when this returns. StorageError if the shared transaction failed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
        await done

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            error: StorageError | None = None
            try:
                await self._database.write(partial(_all, batch))
            except StorageError as found:
                error = found
            for _, done in batch:
                if done.done():
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)


def _all(batch: list[tuple[Work, asyncio.Future[None]]], connection: Connection) -> None:
    for work, _ in batch:
        work(connection)
