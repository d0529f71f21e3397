"""A world of jobs and silos in virtual time, which plays what `schedule` decides and checks it naively."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundtable.server.queue.decision import schedule
from roundtable.server.queue.queue_rules import QueueRules
from roundtable.server.queue.standing import Contender, Standing
from roundtable.server.queue.timeline import Amounts


@dataclass
class PlayedJob:
    """A job of the world: when it is submitted, on which silos, how long each of its rounds takes.

    `known`: whether the queue is told how long. It begins at `earliest`; where it is repeated, `every` so
    many seconds, `runs` are those that are left. `promised`: the first time that it was promised for its
    turn.
    """

    name: str
    at: float
    silos: frozenset[str]
    rounds: int
    seconds: float
    priority: int = 0
    project: str = "p"
    demand: Amounts = field(default_factory=lambda: {"jobs": 1.0})
    least: int = 1
    known: bool = True
    earliest: float = 0.0
    every: float = 0.0
    runs: int = 1
    done: int = 0
    turn: bool = False
    yielding: bool = False
    since: float = 0.0
    round_began: float = 0.0
    promised: float | None = None
    began: float | None = None
    ended: float | None = None

    def contender(self, there: int, now: float) -> Contender:
        elapsed = now - self.round_began if self.turn else 0.0
        rest = self.seconds * (self.rounds - self.done) - elapsed
        return Contender(
            self.name,
            self.name,
            self.project,
            self.priority,
            self.since,
            self.turn,
            self.silos,
            there,
            self.least,
            self.demand,
            yielding=self.yielding,
            rest=rest if self.known else None,
            ends=self.seconds - elapsed if self.known and self.turn else None,
            earliest=self.earliest,
        )

    def following(self, now: float) -> PlayedJob:
        """The run of its series after this one, which has ended now: at the next time after that."""
        base, _, number = self.name.partition("#")
        due = next(n * self.every for n in range(1, 10**6) if n * self.every > now)
        name = f"{base}#{int(number or 1) + 1}"
        (fresh,) = copied([replace(self, name=name, at=now, earliest=due, runs=self.runs - 1)])
        return fresh


class QueueWorld:
    """Plays jobs to their ends. `checks` counts the decisions that were held against the naive oracle.

    `crashes` is how often of ten a coordinator dies while it carries out a decision: a part of it is durable
    then, and another coordinator decides anew from that. `used` are (time, turns, silos at work) after each.
    """

    def __init__(
        self,
        jobs: Sequence[PlayedJob],
        capacities: Mapping[str, Amounts],
        rules: QueueRules,
        crashes: int = 0,
        seed: int = 0,
    ) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.capacities = capacities
        self.rules = rules
        self.now = 0.0
        self.checks = 0
        self.preempted = 0
        self.failovers = 0
        self.used: list[tuple[float, int, int]] = []
        self._crashes = crashes
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, str, str]] = []
        self._number = 0
        for job in jobs:
            self._at(job.at, "submit", job.name)

    def play(self, until: float = float("inf")) -> None:
        """Until nothing is left to happen, or the time has come."""
        while self._events and self._events[0][0] <= until:
            moment, _, what, name = heapq.heappop(self._events)
            self.now, job = moment, self.jobs[name]
            if what == "submit":
                job.since = self.now
            elif what == "round":
                self._round_ended(job)
            self._decide()

    def _round_ended(self, job: PlayedJob) -> None:
        job.done += 1
        if job.done == job.rounds:
            job.turn, job.ended = False, self.now
            if job.runs > 1:
                run = job.following(self.now)
                self.jobs[run.name] = run
                self._at(run.at, "submit", run.name)
        elif job.yielding:
            job.turn, job.yielding, job.since = False, False, self.now
            self.preempted += 1
        else:
            self._round_begins(job)

    def _round_begins(self, job: PlayedJob) -> None:
        job.round_began = self.now
        self._at(self.now + job.seconds, "round", job.name)

    def _decide(self) -> None:
        found = schedule(self._contenders(), self.capacities, self.now, self.rules)
        self._check(found)
        while self._chance.randrange(10) < self._crashes:
            self.failovers += 1
            self._carry_out([each for each in found if self._chance.randrange(2)])
            found = schedule(self._contenders(), self.capacities, self.now, self.rules)
            self._check(found)
        self._carry_out(found)
        at_work = {silo for job in self.jobs.values() if job.turn for silo in job.silos}
        self.used.append((self.now, sum(job.turn for job in self.jobs.values()), len(at_work)))
        waiting = [job for job in self.jobs.values() if job.at <= self.now and not job.turn and not job.ended]
        if waiting and not any(event[2] == "look" and event[0] > self.now for event in self._events):
            self._at(self.now + min(self.rules.ageing / 2, 86400.0), "look", waiting[0].name)

    def _carry_out(self, found: Sequence[Standing]) -> None:
        for standing in found:
            job = self.jobs[standing.job]
            if standing.verdict == "waits" and job.promised is None:
                job.promised = standing.expected
            elif standing.verdict == "begins" and not job.turn:
                assert self.now >= job.earliest, f"{job.name} begins before its time"
                job.turn, job.since = True, self.now
                job.began = self.now if job.began is None else job.began
                self._round_begins(job)
            elif standing.verdict == "yields":
                job.yielding = True

    def _contenders(self) -> list[Contender]:
        return [
            job.contender(len(job.silos), self.now)
            for job in self.jobs.values()
            if job.at <= self.now and job.ended is None
        ]

    def _check(self, found: Sequence[Standing]) -> None:
        """Nothing is given away twice, no quota is broken, and nobody waits for nothing."""
        self.checks += 1
        begins = {each.job for each in found if each.verdict == "begins"}
        holders = [job for job in self.jobs.values() if job.turn or job.name in begins]
        used = self._used_by(holders)
        assert not self._short(used), f"more is given away than there is: {self._short(used)}"
        if any(each.verdict == "yields" for each in found):
            return  # Somebody is promised what they hold: who could begin now may have to wait behind that.
        before: list[Standing] = []
        for standing in (each for each in found if each.verdict == "waits"):
            job = self.jobs[standing.job]
            if job.earliest > self.now:
                assert standing.expected == job.earliest
                continue
            if len(job.silos) >= job.least and not self._short(self._used_by([*holders, job])):
                end = self.now + job.seconds * (job.rounds - job.done) if job.known else float("inf")
                kept = [
                    other
                    for other in before
                    if other.expected is not None
                    and other.expected < end
                    and (self.jobs[other.job].silos & job.silos or self.rules.places())
                ]
                assert kept, f"{job.name} waits for nothing: {standing.reason}"
            before.append(standing)

    def _used_by(self, holders: Sequence[PlayedJob]) -> dict[tuple[str, str], float]:
        """Of each silo, project and the coordinator what these jobs take of each resource."""
        used: dict[tuple[str, str], float] = {}
        for job in holders:
            taken = [(f"silo {silo}", name, n) for silo in job.silos for name, n in job.demand.items()]
            many = len(job.silos)
            whole = {"jobs": 1.0, "silos": many, "gpus": job.demand.get("gpus", 0.0) * many}
            taken += [(f"project {job.project}", name, n) for name, n in whole.items()]
            taken.append(("coordinator", "jobs", 1.0))
            for place, name, amount in taken:
                used[place, name] = used.get((place, name), 0.0) + amount
        return used

    def _short(self, used: Mapping[tuple[str, str], float]) -> list[str]:
        """Where these amounts are more than there is."""
        most = {(f"silo {s}", name): n for s, has in self.capacities.items() for name, n in has.items()}
        for project, table in self.rules.projects.items():
            most |= {(f"project {project}", name): n for name, n in table.amounts.items()}
        if self.rules.turns is not None:
            most["coordinator", "jobs"] = self.rules.turns
        return [f"{key}: {amount}" for key, amount in used.items() if amount > most.get(key, amount)]

    def _at(self, moment: float, what: str, name: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (moment, self._number, what, name))


def copied(jobs: Sequence[PlayedJob]) -> list[PlayedJob]:
    """The same jobs, before anything has happened to them."""
    fresh = {"done": 0, "turn": False, "yielding": False, "since": 0.0, "round_began": 0.0}
    return [replace(job, **fresh, promised=None, began=None, ended=None) for job in jobs]


def a_day(jobs: int, silos: int, seed: int) -> tuple[list[PlayedJob], dict[str, dict[str, float]]]:
    """Jobs that come over a day on silos of unequal size: five projects, three priorities."""
    chance = random.Random(seed)
    names = [f"silo{n:03}" for n in range(silos)]
    capacities = {
        name: {"jobs": float(chance.randint(1, 2)), "gpus": float(chance.randint(0, 4))} for name in names
    }
    found = []
    for number in range(jobs):
        demand = {"jobs": 1.0} | ({"gpus": 1.0} if chance.random() < 0.3 else {})
        fitting = [n for n in names if all(capacities[n][r] >= amount for r, amount in demand.items())]
        found.append(
            PlayedJob(
                f"job{number:03}",
                float(chance.randint(0, 86400)),
                frozenset(chance.sample(fitting, chance.randint(3, min(29, len(fitting))))),
                chance.randint(3, 19),
                float(round(chance.lognormvariate(4.8, 0.7))) + 1.0,
                chance.randint(-1, 1),
                chance.choice("pqrst"),
                demand,
                known=chance.random() < 0.9,
            )
        )
    return found, capacities
