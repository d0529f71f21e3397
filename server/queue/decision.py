"""Which jobs have their turn: a pure function of the jobs, the silos, the operators' rules and the clock.

A job's turn is of all its silos together or of none (gang scheduling): one that waits holds nothing. Among
those that wait, the higher level goes first; at one level the project with the smallest dominant share of
what the silos have (Ghodsi et al. 2011, Dominant Resource Fairness, Algorithm 1, with weights as in its
Section 4.3), then who has waited longest. A level is the job's priority, and one more for each `ageing`
seconds of waiting; a turn does not age. A job that stands a level above all that are in its way takes their
turns when their rounds end; until then nobody behind it gets what it waits for. So nobody starves: whoever
waits rises, and those with a turn do not.

Each job that waits is promised the first time at which all that it needs is free for as long as it takes, if
all keep to what is expected of them (conservative backfill: Mu'alem and Feitelson 2001). One that is in
nobody's way begins at once, also before those that stand higher, unless that would break such a promise to
them. Where it is not known how long somebody takes, nothing that comes after is promised or kept free.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from roundtable.server.queue.queue_rules import ALL, QueueRules
from roundtable.server.queue.standing import Contender, Standing
from roundtable.server.queue.timeline import ONE_JOB, Amounts, Needs, Spot, Timeline

_SHOWN = 3
_PLANNED = 100
"""To so many of those that wait a time is promised; the effort grows with the square."""


def schedule(
    contenders: Iterable[Contender], capacities: Mapping[str, Amounts], now: float, rules: QueueRules
) -> list[Standing]:
    """Those with a turn first, then those that wait, in their order.

    `capacities`: of each silo what it has. One that is not named has said nothing since the coordinator
    began: it has room for one job, and takes nothing back from those that have it. One that has less than it
    gives away, because it says so since, gets it back from those with the lowest priority.
    """
    return _Board(list(contenders), capacities, now, rules).standings()


def basis_of_turns(contenders: Iterable[Contender], learnt: int) -> object:
    """All that `schedule` looks at where nobody waits, to compare; None where somebody does.

    Turns that nobody waits for change with the silos that there are, not with the time; `learnt` counts how
    often something new became known of what they have.
    """
    basis: list[object] = [learnt]
    for each in contenders:
        if not each.turn:
            return None
        basis.append((each.job, each.yielding, each.priority, each.since, each.silos, each.demand))
    return basis


class _Board:
    def __init__(
        self,
        contenders: Sequence[Contender],
        capacities: Mapping[str, Amounts],
        now: float,
        rules: QueueRules,
    ) -> None:
        self._now = now
        self._rules = rules
        self._turns = sorted((c for c in contenders if c.turn), key=lambda c: (-c.priority, c.since, c.job))
        self._waiting = [c for c in contenders if not c.turn]
        silos = {silo: capacities.get(silo, ONE_JOB) for c in contenders for silo in c.silos}
        self._total: dict[str, float] = defaultdict(float)
        for amounts in silos.values():
            for resource, amount in amounts.items():
                self._total[resource] += amount
        self._unheard = frozenset(Spot("silo", name) for name in silos if name not in capacities)
        self._has = rules.places() | {Spot("silo", name): amounts for name, amounts in silos.items()}
        self._room = {place: dict(amounts) for place, amounts in self._has.items()}
        self._needs = {c.job: self._needs_of(c) for c in contenders}
        self._timeline = Timeline(self._has, now)
        self._used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._shares: dict[str, float] = {}
        self._on: dict[Spot, list[Contender]] = defaultdict(list)
        self._gone: dict[str, float] = {}
        self._promised: list[Contender] = []
        self._claims: list[tuple[Contender, list[Contender]]] = []

    def standings(self) -> list[Standing]:
        for contender in self._turns:
            self._take(contender)
            seconds = contender.round_seconds if contender.yielding else contender.seconds
            self._gone[contender.job] = self._now + seconds
            self._timeline.hold(self._needs[contender.job], self._now, self._now + seconds)
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

    def _needs_of(self, contender: Contender) -> Needs:
        """What it takes of each silo, and of what its project and all jobs may have."""
        needs: dict[Spot, Amounts] = {Spot("silo", name): contender.demand for name in contender.silos}
        many = len(contender.silos)
        whole = {"jobs": 1.0, "silos": float(many), "gpus": contender.demand.get("gpus", 0.0) * many}
        shared = {Spot("project", contender.project): whole, ALL: ONE_JOB}
        return needs | {place: demand for place, demand in shared.items() if place in self._has}

    def _in_order(self) -> Iterable[Contender]:
        """Those that wait, the next one last decided: shares change with each that begins."""
        left = {contender.job: contender for contender in self._waiting}
        while left:
            following = min(left.values(), key=self._rank)
            del left[following.job]
            yield following

    def _rank(self, contender: Contender) -> tuple[int, float, float, str]:
        level = contender.level(self._now, self._rules.ageing)
        return (-level, self._share(contender.project), contender.waits_from, contender.job)

    def _share(self, project: str) -> float:
        """The project's dominant share: the largest of its shares in each resource, by its weight."""
        if project not in self._shares:
            used = self._used[project]
            shares = (used[r] / total for r, total in self._total.items() if total and r in used)
            self._shares[project] = max(shares, default=0.0) / self._rules.weight(project)
        return self._shares[project]

    def _take(self, contender: Contender) -> None:
        self._shares.pop(contender.project, None)
        for resource, amount in contender.demand.items():
            self._used[contender.project][resource] += amount * len(contender.silos)
        for place, demand in self._needs[contender.job].items():
            self._on[place].append(contender)
            room = self._room[place]
            for resource, amount in demand.items():
                if resource in room:
                    room[resource] -= amount

    def _overdrawn(self) -> dict[str, str]:
        """Turns that a place has no room for any more, and why: the lowest go, until the rest fits."""
        back: dict[str, str] = {}
        for place, room in self._room.items():
            if place in self._unheard:
                continue
            short = {resource: -amount for resource, amount in room.items() if amount < 0}
            for contender in sorted(self._on[place], key=self._turns.index, reverse=True):
                demand = self._needs[contender.job][place]
                if not any(short.get(r, 0) > 0 for r in demand):
                    continue
                if not contender.yielding:
                    back.setdefault(contender.job, f"{_called(place)} has no room for it any more")
                short = {r: amount - demand.get(r, 0) for r, amount in short.items()}
        return back

    def _place(self, contender: Contender, number: int) -> Standing:
        """The verdict on a job that waits, with what it takes or claims noted for those behind it."""
        job, needs = contender.job, self._needs[contender.job]
        if blocked := contender.blocked or self._beyond(needs):
            return Standing(job, "waits", blocked, number)
        if contender.earliest > self._now:
            told = datetime.fromtimestamp(contender.earliest, UTC).isoformat(" ", "seconds")
            return Standing(job, "waits", f"it begins at {told}", number, contender.earliest)
        if contender.there < contender.least or contender.shortage:
            return Standing(job, "waits", contender.shortage, number)
        in_the_way = self._in_the_way(needs)
        if in_the_way and number > _PLANNED:
            return Standing(job, "waits", _has_its_turn(in_the_way), number)
        begin = self._timeline.first(needs, contender.seconds, self._now)
        if not in_the_way and begin <= self._now:
            self._take(contender)
            self._timeline.hold(needs, self._now, self._now + contender.seconds)
            return Standing(job, "begins", "", number, self._now)
        if (
            in_the_way
            and (moment := self._claimed(contender, [other for other, _ in in_the_way])) is not None
        ):
            reason = f"begins when the rounds of {_names(o.name for o, _ in in_the_way)} end"
            return Standing(job, "waits", reason, number, moment if moment < math.inf else None)
        before = self._before(needs)
        reason = _has_its_turn(in_the_way) or _keeps(before)
        lifted = self._lifted(contender, in_the_way)
        if lifted < begin and (unknown := [other.name for other in before if other.seconds == math.inf]):
            reason += f"; how long {_names(unknown)} will take is not known, so the time is the latest"
        self._timeline.hold(needs, begin, begin + contender.seconds)
        self._promised.append(contender)
        begin = min(begin, lifted)
        return Standing(job, "waits", reason, number, begin if begin < math.inf else None)

    def _beyond(self, needs: Needs) -> str:
        """Which place never has as much as that, with all jobs gone; "" for none."""
        for place, demand in needs.items():
            for resource, amount in demand.items():
                most = self._has[place].get(resource, math.inf)
                if place.kind != "silo" and amount > most:
                    return f"{_called(place)} may have {most:g} {resource} at a time, and it takes {amount:g}"
        return ""

    def _claimed(self, contender: Contender, others: Sequence[Contender]) -> float | None:
        """When it has its turn after the rounds of those in its way, which it takes over; None where it may
        not: one of them stands as high, or it would keep somebody from what is promised."""
        level = contender.level(self._now, self._rules.ageing)
        if not all(other.turn and self._gives_way(other, level) for other in others):
            return None
        needs = self._needs[contender.job]
        ends = {other.job: self._now + other.round_seconds for other in others}
        known = [end for end in ends.values() if end < math.inf]
        # A round whose end is not known counts as over with the last of the others: a plan, no promise.
        moment = max(known, default=self._now)
        freed = [other for other in others if min(ends[other.job], moment) < self._gone[other.job]]
        for other in freed:
            end = min(ends[other.job], moment)
            self._timeline.hold(self._needs[other.job], end, self._gone[other.job], -1.0)
        if self._timeline.first(needs, contender.seconds, moment) > moment:
            for other in freed:
                end = min(ends[other.job], moment)
                self._timeline.hold(self._needs[other.job], end, self._gone[other.job])
            return None
        for other in freed:
            self._gone[other.job] = min(ends[other.job], moment)
        self._claims.append((contender, list(others)))
        self._take(contender)
        self._timeline.hold(needs, moment, moment + contender.seconds)
        return max(ends.values())

    def _gives_way(self, other: Contender, level: int) -> bool:
        cannot_begin = other.starved and (other.there < other.least or bool(other.shortage))
        return cannot_begin or other.yielding or level > other.priority

    def _in_the_way(self, needs: Needs) -> list[tuple[Contender, Spot]]:
        """Those whose places have no room for this one beside them, each with one such place."""
        found: dict[str, tuple[Contender, Spot]] = {}
        for place, demand in sorted(needs.items()):
            room = self._room[place]
            lacking = [r for r, amount in demand.items() if room.get(r, math.inf) < amount]
            for other in self._on[place] if lacking else ():
                if any(self._needs[other.job][place].get(resource) for resource in lacking):
                    found.setdefault(other.job, (other, place))
        return list(found.values())

    def _lifted(self, contender: Contender, in_the_way: Sequence[tuple[Contender, Spot]]) -> float:
        """When waiting has lifted it above those in its way and their rounds end; infinity for never."""
        if not in_the_way or not all(other.turn for other, _ in in_the_way):
            return math.inf
        steps = max(other.priority + 1 - contender.priority for other, _ in in_the_way)
        return max(self._now, contender.waits_from + steps * self._rules.ageing)

    def _before(self, needs: Needs) -> list[Contender]:
        """Those that some of its places are promised to."""
        places = set(needs)
        return [other for other in self._promised if places & set(self._needs[other.job])]


def _keeps(before: Sequence[Contender]) -> str:
    """For whom it waits though it would fit."""
    return f"it would keep {_names(other.name for other in before)} from a turn that is promised"


def _has_its_turn(in_the_way: Sequence[tuple[Contender, Spot]]) -> str:
    if not in_the_way:
        return ""
    where = _names(_called(place) for place in sorted({place for _, place in in_the_way}))
    return f"{_names(other.name for other, _ in in_the_way)} has its turn at {where}"


def _called(place: Spot) -> str:
    if place.kind == "silo":
        return place.name
    return f"project {place.name!r}" if place.kind == "project" else "the coordinator"


def _names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    told = list(dict.fromkeys(names))
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return ", ".join(told[:_SHOWN]) + more
