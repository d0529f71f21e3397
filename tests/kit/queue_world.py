"""A world of jobs and silos in virtual time, which plays what `schedule` decides and checks it naively."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundtable.server.queue.decision import Amounts, Contender, Standing, schedule


@dataclass
class PlayedJob:
    """A job of the world: when it is submitted, on which silos, how long each of its rounds takes."""

    name: str
    at: float
    silos: frozenset[str]
    rounds: int
    seconds: float
    priority: int = 0
    project: str = "p"
    demand: Amounts = field(default_factory=lambda: {"jobs": 1.0})
    least: int = 1
    done: int = 0
    turn: bool = False
    yielding: bool = False
    since: float = 0.0
    began: float | None = None
    ended: float | None = None

    def contender(self, there: int) -> Contender:
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
            rest=self.seconds * (self.rounds - self.done),
        )


class QueueWorld:
    """Plays jobs to their ends. `checks` counts the decisions that were held against the naive oracle."""

    def __init__(self, jobs: Sequence[PlayedJob], capacities: Mapping[str, Amounts], ageing: float) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.capacities = capacities
        self.ageing = ageing
        self.now = 0.0
        self.checks = 0
        self.preempted = 0
        self.busy = 0.0
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
        self.busy += job.seconds * len(job.silos)
        if job.done == job.rounds:
            job.turn, job.ended = False, self.now
        elif job.yielding:
            job.turn, job.yielding, job.since = False, False, self.now
            self.preempted += 1
        else:
            self._at(self.now + job.seconds, "round", job.name)

    def _decide(self) -> None:
        found = schedule(self._contenders(), self.capacities, self.now, self.ageing)
        self._check(found)
        for standing in found:
            job = self.jobs[standing.job]
            if standing.verdict == "begins":
                job.turn, job.since = True, self.now
                job.began = self.now if job.began is None else job.began
                self._at(self.now + job.seconds, "round", job.name)
            elif standing.verdict == "yields":
                job.yielding = True
        waiting = [job for job in self.jobs.values() if job.at <= self.now and not job.turn and not job.ended]
        if waiting and not any(event[2] == "look" and event[0] > self.now for event in self._events):
            self._at(self.now + self.ageing / 2, "look", waiting[0].name)

    def _contenders(self) -> list[Contender]:
        return [
            job.contender(len(job.silos))
            for job in self.jobs.values()
            if job.at <= self.now and job.ended is None
        ]

    def _check(self, found: Sequence[Standing]) -> None:
        """Nothing is given away twice, and nobody waits for nothing."""
        self.checks += 1
        begins = {each.job for each in found if each.verdict == "begins"}
        yields = {each.job for each in found if each.verdict == "yields"}
        holders = [job for job in self.jobs.values() if job.turn or job.name in begins]
        used = {silo: dict.fromkeys(has, 0.0) for silo, has in self.capacities.items()}
        for job in holders:
            for silo in job.silos:
                for resource, amount in job.demand.items():
                    used[silo][resource] += amount
        for silo, amounts in used.items():
            for resource, amount in amounts.items():
                assert amount <= self.capacities[silo][resource], (silo, resource, amount)
        if yields:
            return  # Somebody is promised what they hold: who could begin now may have to wait behind that.
        for standing in found:
            job = self.jobs[standing.job]
            if standing.verdict == "waits" and len(job.silos) >= job.least:
                assert any(
                    used[silo][resource] + amount > self.capacities[silo][resource]
                    for silo in job.silos
                    for resource, amount in job.demand.items()
                ), f"{job.name} waits for nothing: {standing.reason}"

    def _at(self, moment: float, what: str, name: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (moment, self._number, what, name))


def copied(jobs: Sequence[PlayedJob]) -> list[PlayedJob]:
    """The same jobs, before anything has happened to them."""
    return [
        replace(job, done=0, turn=False, yielding=False, since=0.0, began=None, ended=None) for job in jobs
    ]
