"""A pool of nodes that an operator's autoscaler starts and ends: how many are wanted, and when it is told.

Its command gets one JSON object and answers with one, `{"nodes": N}`: how many there are now. What it gets:

- `pool`, and `nodes`: how many are wanted; null for the first question, which changes nothing;
- `least`, `most`, `spare`: the bounds that `nodes` keeps to, and what of it nobody works on;
- `reason`, in words, and `load`: what is at work and what waits.

It is asked again and again with the same object, so it sets a number and adds nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from roundtable.core.bounds import one_line
from roundtable.core.errors import ResourceError, RoundtableError
from roundtable.core.hooks.hook_command import ask_command
from roundtable.core.toml_tables import Finite, Names, Seconds, Table

log = logging.getLogger("roundtable.node_pool")
MOST_NODES = 100_000
MOST_REASON = 200


class PoolTable(Table):
    """The rules of one pool; `least` ≤ nodes ≤ `most`, and no more than `cost` pays for."""

    command: Names = Field(
        min_length=1, max_length=50, description="program and arguments, without a shell; JSON in, JSON out"
    )
    most: int = Field(ge=1, le=MOST_NODES, description="nodes at most")
    least: int = Field(0, ge=0, le=MOST_NODES, description="nodes at least")
    spare: int = Field(0, ge=0, le=MOST_NODES, description="nodes beside those at work, ready for what comes")
    up_after: Seconds = Field(60.0, ge=0, description="work waits for so long before there are more nodes")
    down_after: Seconds = Field(
        900.0, ge=0, le=86400, description="nodes are not needed for so long before there are fewer"
    )
    every: Seconds = Field(60.0, ge=1, le=86400, description="how often the command is run")
    timeout: Seconds = Field(60.0, gt=0, le=600, description="a command that takes longer has failed")
    node_cost: Finite | None = Field(None, gt=0, description="what a node costs an hour, in any currency")
    cost: Finite | None = Field(None, gt=0, description="the most that all nodes may cost an hour")

    @property
    def limit(self) -> int:
        """The most nodes, by number and by cost."""
        if self.node_cost is None or self.cost is None:
            return self.most
        return math.floor(min(self.most, self.cost / self.node_cost + 1e-9))

    @model_validator(mode="after")
    def _bounds(self) -> PoolTable:
        if (self.node_cost is None) != (self.cost is None):
            raise ValueError("node_cost and cost go together: what one node costs, and the most for all")
        if not self.least <= self.limit or self.limit < 1:
            raise ValueError(
                f"least = {self.least}, and at most {self.limit} nodes fit within most and cost: raise one"
            )
        return self


@dataclass(frozen=True)
class PoolLoad:
    """What a pool has to do: nodes at work, nodes that work waits for, and for how long, in seconds.

    `told` is what the command hears of it.
    """

    busy: int
    lacking: int = 0
    waited: float = 0.0
    told: Mapping[str, Any] = field(default_factory=dict)


class NodePool:
    """How many nodes are wanted; up as soon as work has waited, down once fewer were enough for long.

    A pure state machine: times are handed in, and never go back.
    """

    def __init__(self, table: PoolTable, began: float) -> None:
        self._table = table
        self._began = began
        # Of the targets within `down_after`: times and targets, targets falling; the first is the largest.
        self._falling: deque[tuple[float, int]] = deque()

    def wanted(self, load: PoolLoad, now: float, there: int | None) -> int | None:
        """The number of nodes; None while that would be a guess.

        `there`: how many there are, None where that is not known yet. What another process has started, such
        as a coordinator that this one has taken over from, stays for `down_after` too.
        """
        table = self._table
        lacking = load.lacking if load.waited >= table.up_after else 0
        target = min(table.limit, max(table.least, load.busy + lacking + table.spare))
        while self._falling and self._falling[-1][1] <= target:
            self._falling.pop()
        self._falling.append((now, target))
        while self._falling[0][0] < now - table.down_after:
            self._falling.popleft()
        if now - self._began < table.down_after:
            return None if there is None else max(self._falling[0][1], min(there, table.limit))
        return self._falling[0][1]


class PoolKeeper:
    """Runs the command of a pool again and again, and at once where `look` says that something changed."""

    def __init__(
        self,
        name: str,
        table: PoolTable,
        load: Callable[[], PoolLoad],
        failed: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` is asked before each run; `failed` hears once of each reason for which the command fails."""
        self._name = name
        self._table = table
        self._load = load
        self._failed = failed
        self._clock = clock
        self._pool = NodePool(table, clock())
        self._changed = asyncio.Event()
        self._asked: int | None = None
        self._last = -math.inf
        self.there: int | None = None
        self.trouble = ""

    def look(self) -> None:
        """Something has changed that may need other nodes."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; the command that runs then is killed."""
        while True:
            self._changed.clear()
            try:
                await self.ask()
            except Exception:
                # Whatever is wrong with the pool, the process has other work.
                log.exception("the pool %s cannot be looked at; it is tried again", self._name)
            try:
                async with asyncio.timeout(self._table.every):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def ask(self) -> None:
        """Runs the command, if another number is wanted or it is time; never raises what the command did."""
        load, now = self._load(), self._clock()
        wanted = self._pool.wanted(load, now, self.there)
        if wanted == self._asked and now - self._last < self._table.every:
            return
        self._last, reason = now, _reason(load, wanted, self.there)
        inquiry = {
            "pool": self._name,
            "nodes": wanted,
            "least": self._table.least,
            "most": self._table.limit,
            "spare": self._table.spare,
            "reason": reason,
            "load": {"busy": load.busy, "lacking": load.lacking, "waited": load.waited, **load.told},
        }
        try:
            async with asyncio.timeout(self._table.timeout):
                self.there = _nodes_of(await ask_command(self._table.command, inquiry))
        except TimeoutError:
            self._fails(f"no answer within {self._table.timeout:g} s")
            return
        except RoundtableError as error:
            self._fails(str(error))
            return
        if self.trouble:
            log.info("pool %s: its autoscaler answers again", self._name)
        if wanted != self._asked and wanted is not None:
            log.info("pool %s: %d nodes wanted, %d there: %s", self._name, wanted, self.there, reason)
        self.trouble, self._asked = "", wanted
        if wanted is None:
            self._changed.set()

    def _fails(self, reason: str) -> None:
        self._asked = None
        if reason != self.trouble:
            self.trouble = reason
            log.warning("pool %s: its autoscaler failed: %s; it is asked again", self._name, reason)
            self._failed(reason)


def _reason(load: PoolLoad, wanted: int | None, there: int | None) -> str:
    if wanted is None:
        return "how many there are is not known yet"
    if load.lacking and (there is None or wanted > there):
        return f"work waits for {load.lacking} more, {load.waited:.0f} s so far"
    return f"{load.busy} at work"


def _nodes_of(answer: Any) -> int:
    """How many nodes there are. ResourceError for an answer that does not say it."""
    nodes = answer.get("nodes") if isinstance(answer, Mapping) else None
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 0 <= nodes <= MOST_NODES:
        shown = one_line(repr(answer), MOST_REASON)
        raise ResourceError(f'it did not answer {{"nodes": N}}, with the number that there are, but {shown}')
    return nodes
