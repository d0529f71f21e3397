"""Which jobs have their turn: a pure function of the jobs, the silos and the clock.

A job's turn is of all its silos together or of none (gang scheduling): one that waits holds nothing. Among
those that wait, the higher level goes first; at one level the project with the smallest dominant share of
what the silos have (Ghodsi et al. 2011, Dominant Resource Fairness, Algorithm 1), then who has waited
longest. A level is the job's priority, and one more for each `ageing` seconds of waiting; a turn does not
age. A job that stands a level above all that are in its way takes their turns when their rounds end; until
then nobody behind it gets what it waits for. So nobody starves: whoever waits rises, and those with a turn do
not. Who is in nobody's way begins at once, also before those that stand higher and cannot (backfill).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Amounts = Mapping[str, float]
"""Of each resource how much: "jobs", "gpus", "memory" (bytes). What is not named is not limited."""
ONE_JOB: Amounts = {"jobs": 1.0}
_SHOWN = 3


@dataclass(frozen=True)
class Contender:
    """A job that is neither over nor paused, as the queue sees it.

    - `since`: when it began to wait, or got its turn; `turn`: it has it; `yielding`: until its round ends.
    - `starved`: it has its turn, and nobody was asked for anything yet.
    - `silos`: all that are known, suit it and may be asked; `there`: how many of them are connected;
      `least`: with how many of them it can begin; `shortage`: what it waits for where these are fewer.
    - `demand`: what it takes of each silo.
    - `blocked`: why it cannot have its turn, whatever the others do; "" where it can.
    - `rest`: seconds until its last round ends if they go on as they did; None where none has ended yet.
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

    def level(self, now: float, ageing: float) -> int:
        """Its priority, and what waiting has added."""
        waited = 0.0 if self.turn else max(0.0, now - self.since)
        return self.priority + math.floor(waited / ageing)


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


def schedule(
    contenders: Iterable[Contender], capacities: Mapping[str, Amounts], now: float, ageing: float
) -> list[Standing]:
    """Those with a turn first, then those that wait, in their order.

    `capacities`: of each silo what it has; one that is not named has room for one job. A silo that has less
    than it gives away, because it says so since, gets it back from those with the lowest priority.
    """
    return _Board(list(contenders), capacities, now, ageing).standings()


class _Board:
    def __init__(
        self, contenders: Sequence[Contender], capacities: Mapping[str, Amounts], now: float, ageing: float
    ) -> None:
        self._now = now
        self._ageing = ageing
        self._turns = sorted((c for c in contenders if c.turn), key=lambda c: (-c.priority, c.since, c.job))
        self._waiting = [c for c in contenders if not c.turn]
        silos = {silo for c in contenders for silo in c.silos}
        self._room = {silo: dict(capacities.get(silo, ONE_JOB)) for silo in silos}
        self._total: dict[str, float] = defaultdict(float)
        for room in self._room.values():
            for resource, amount in room.items():
                self._total[resource] += amount
        self._used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._on: dict[str, list[Contender]] = defaultdict(list)
        self._gone: dict[str, float | None] = {}
        self._out: list[str] = [c.job for c in self._turns if c.yielding]

    def standings(self) -> list[Standing]:
        for contender in self._turns:
            self._take(contender)
            self._gone[contender.job] = None if contender.rest is None else self._now + contender.rest
        taken_back = self._overdrawn()
        waits = [self._place(contender, number) for number, contender in enumerate(self._in_order(), 1)]
        found = []
        for contender in self._turns:
            why = taken_back.get(contender.job) or next(
                (f"{each.name} goes first" for each, victims in self._claims if contender in victims), ""
            )
            verdict: Literal["runs", "yields"] = "yields" if why or contender.yielding else "runs"
            found.append(Standing(contender.job, verdict, "" if contender.yielding else why))
        return [*found, *waits]

    def _in_order(self) -> Iterable[Contender]:
        """Those that wait, the next one last decided: shares change with each that begins."""
        self._claims: list[tuple[Contender, list[Contender]]] = []
        left = {contender.job: contender for contender in self._waiting}
        while left:
            following = min(left.values(), key=self._rank)
            del left[following.job]
            yield following

    def _rank(self, contender: Contender) -> tuple[int, float, float, str]:
        level = contender.level(self._now, self._ageing)
        return (-level, self._share(contender.project), contender.since, contender.job)

    def _share(self, project: str) -> float:
        """The project's dominant share: the largest of its shares in each resource."""
        used = self._used[project]
        return max((used[r] / total for r, total in self._total.items() if total and r in used), default=0.0)

    def _take(self, contender: Contender) -> None:
        for silo in contender.silos:
            self._on[silo].append(contender)
            room = self._room[silo]
            for resource, amount in contender.demand.items():
                self._used[contender.project][resource] += amount
                if resource in room:
                    room[resource] -= amount

    def _overdrawn(self) -> dict[str, str]:
        """Turns that a silo has no room for any more, and why: the lowest go, until the rest fits."""
        back: dict[str, str] = {}
        for silo, room in self._room.items():
            short = {resource: -amount for resource, amount in room.items() if amount < 0}
            for contender in sorted(self._on[silo], key=self._turns.index, reverse=True):
                if not any(short.get(r, 0) > 0 for r in contender.demand):
                    continue
                if contender.job not in self._out:
                    back.setdefault(contender.job, f"{silo} has no room for it any more")
                short = {r: amount - contender.demand.get(r, 0) for r, amount in short.items()}
        return back

    def _place(self, contender: Contender, number: int) -> Standing:
        """The verdict on a job that waits, with what it takes or claims noted for those behind it."""
        if contender.blocked:
            return Standing(contender.job, "waits", contender.blocked, number)
        if contender.there < contender.least:
            return Standing(contender.job, "waits", contender.shortage, number)
        in_the_way = self._in_the_way(contender)
        if not in_the_way:
            self._take(contender)
            self._gone[contender.job] = None if contender.rest is None else self._now + contender.rest
            return Standing(contender.job, "begins", "", number, self._now)
        level = contender.level(self._now, self._ageing)
        if all(other.turn and self._gives_way(other, level) for other, _ in in_the_way):
            self._claims.append((contender, [other for other, _ in in_the_way]))
            self._take(contender)
            reason = f"begins when the rounds of {_names(o.name for o, _ in in_the_way)} end"
            return Standing(contender.job, "waits", reason, number, None)
        where = _names(sorted({silo for _, silo in in_the_way}))
        reason = f"{_names(other.name for other, _ in in_the_way)} has its turn at {where}"
        return Standing(contender.job, "waits", reason, number, self._expected(contender, in_the_way))

    def _gives_way(self, other: Contender, level: int) -> bool:
        cannot_begin = other.starved and other.there < other.least
        return cannot_begin or other.yielding or level > other.priority

    def _in_the_way(self, contender: Contender) -> list[tuple[Contender, str]]:
        """Those whose silos have no room for this one beside them, each with one such silo."""
        found: dict[str, tuple[Contender, str]] = {}
        for silo in sorted(contender.silos):
            room = self._room[silo]
            lacking = [r for r, amount in contender.demand.items() if room.get(r, math.inf) < amount]
            for other in self._on[silo] if lacking else ():
                if any(other.demand.get(resource) for resource in lacking):
                    found.setdefault(other.job, (other, silo))
        return list(found.values())

    def _expected(self, contender: Contender, in_the_way: Sequence[tuple[Contender, str]]) -> float | None:
        """When those in its way are done, or when waiting has lifted it above them, whichever is first."""
        ends = [self._gone.get(other.job) for other, _ in in_the_way]
        lifted = None
        if all(other.turn for other, _ in in_the_way):
            steps = max(other.priority + 1 - contender.priority for other, _ in in_the_way)
            lifted = max(self._now, contender.since + steps * self._ageing)
        done = None if any(end is None for end in ends) else max(end for end in ends if end is not None)
        times = [each for each in (lifted, done) if each is not None]
        return min(times) if times else None


def _names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    told = list(dict.fromkeys(names))
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return ", ".join(told[:_SHOWN]) + more
