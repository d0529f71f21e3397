"""Whose turn it is, in two values: a job as the queue sees it, and what the queue says of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from roundtable.server.queue.timeline import Amounts


@dataclass(frozen=True)
class Contender:
    """A job that is neither over nor paused, as the queue sees it.

    - `since`: when it began to wait, or got its turn; `turn`: it has it; `yielding`: until its round ends.
    - `starved`: it has its turn, and nobody was asked for anything yet.
    - `silos`: all that are known, suit it and may be asked; `there`: how many of them are connected;
      `least`: with how many of them it can begin; `shortage`: what it waits for where these are fewer.
    - `demand`: what it takes of each silo.
    - `blocked`: why it cannot have its turn, whatever the others do; "" where it can.
    - `rest`: seconds until its last round ends if all goes as expected, and `ends` until the one that runs
      does; None where that is not known.
    - `earliest`: it does not begin before this time.
    """

    job: str
    name: str
    project: str
    priority: int
    since: float
    turn: bool
    silos: frozenset[str]
    there: int
    least: int
    demand: Amounts
    starved: bool = False
    yielding: bool = False
    shortage: str = ""
    blocked: str = ""
    rest: float | None = None
    ends: float | None = None
    earliest: float = 0.0

    @property
    def waits_from(self) -> float:
        """From when on its waiting counts: nobody waits before it may begin."""
        return max(self.since, self.earliest)

    def level(self, now: float, ageing: float) -> int:
        """Its priority, and what waiting has added: what waits for a person or another job is not in line."""
        waited = 0.0 if self.turn or self.blocked else max(0.0, now - self.waits_from)
        return self.priority + math.floor(waited / ageing)

    @property
    def seconds(self) -> float:
        """How long its turn lasts; infinity where that is not known."""
        return math.inf if self.rest is None else self.rest

    @property
    def round_seconds(self) -> float:
        """When the round that runs is over; infinity where that is not known."""
        return min(self.seconds, math.inf if self.ends is None else self.ends)


@dataclass(frozen=True)
class Standing:
    """What the queue says of a job, and why. `place` counts those that wait, from 1; 0 for a turn.

    `expected` is about when its turn will be (Unix time); None where that cannot be told.
    """

    job: str
    verdict: Literal["runs", "begins", "yields", "waits"]
    reason: str
    place: int = 0
    expected: float | None = None
