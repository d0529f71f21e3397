"""Nodes that are started when a step needs them: what the silo's pool has to do, and the wait for rank 0."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from roundtable.client.failures import WorkFailed
from roundtable.client.policy.cluster_table import NodePoolTable
from roundtable.client.trainer import StepWork
from roundtable.core.hooks.node_pool import PoolKeeper, PoolLoad

_log = logging.getLogger("roundtable.agent")


class NodeStarts:
    """Counts the steps that want the nodes, and has the pool's command run while there are any, and after."""

    def __init__(self, table: NodePoolTable, nodes: int, ranks_are_there: Callable[[], bool]) -> None:
        self._table = table
        self._nodes = nodes
        self._ranks_are_there = ranks_are_there
        self._wanting = 0
        self._since = 0.0
        self.keeper = PoolKeeper("cluster", table, self._load)
        self._task: asyncio.Task[None] | None = None

    @property
    def patience(self) -> float:
        """Seconds after which nobody waits any more: `coming` has ended the wait before."""
        return 2 * self._table.ready

    def start(self) -> None:
        """Begins to ask the command; a step is not needed for that."""
        self._task = asyncio.get_running_loop().create_task(self.keeper.run(), name="pool of nodes")

    async def close(self) -> None:
        """Asks no more; nodes that run stay until the agent is back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @asynccontextmanager
    async def wanted(self) -> AsyncIterator[None]:
        """Within it the nodes are needed."""
        if not self._wanting:
            self._since = time.monotonic()
        self._wanting += 1
        self.keeper.look()
        try:
            yield
        finally:
            self._wanting -= 1
            self.keeper.look()

    @asynccontextmanager
    async def coming(self, work: StepWork) -> AsyncIterator[None]:
        """While the ranks are not there the step stands in line, and no deadline runs.

        WorkFailed where they do not come within `ready`.
        """
        if self._ranks_are_there():
            yield
            return
        _log.info("cluster: %s waits for its nodes", work.step)
        work.in_line(True)
        try:
            async with asyncio.timeout(self._table.ready):
                yield
        except TimeoutError as error:
            why = f"the pool's command counts {self.keeper.there or 0} nodes"
            if self.keeper.trouble:
                why = "the pool's command fails, and the silo's log says how"
            raise WorkFailed(
                "node_failure", f"no rank connected within {self._table.ready:g} s: {why}"
            ) from error
        work.in_line(False)

    def _load(self) -> PoolLoad:
        if not self._wanting:
            return PoolLoad(0)
        if self._ranks_are_there():
            return PoolLoad(self._nodes)
        return PoolLoad(0, self._nodes, time.monotonic() - self._since)
