"""What each place has free from now on, beside the jobs that have it and those that it is promised to.

A place is a silo, or something that many jobs share: a project's quota. It has amounts of several resources;
a job takes the same of each for as long as its turn lasts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Literal, NamedTuple

Amounts = Mapping[str, float]
"""Of each resource how much: "jobs", "gpus", "memory" and "disk" in bytes. What is not named has no limit."""
ONE_JOB: Amounts = {"jobs": 1.0}


class Spot(NamedTuple):
    """Where jobs take something: a silo, what a project may have, or what all jobs may have together."""

    kind: Literal["silo", "project", "all"]
    name: str


Needs = Mapping[Spot, Amounts]
"""What a job takes at each place during its turn."""


class Timeline:
    """Free amounts over time, step by step; `has` is what each place has when nobody is there."""

    def __init__(self, has: Mapping[Spot, Amounts], now: float) -> None:
        self._begins: dict[Spot, list[float]] = {place: [now] for place in has}
        self._free: dict[Spot, list[dict[str, float]]] = {p: [dict(amounts)] for p, amounts in has.items()}

    def hold(self, needs: Needs, begin: float, end: float, sign: float = 1.0) -> None:
        """Takes what is needed from `begin` to `end` (`math.inf`: for good); with `sign` −1 gives it back."""
        if not begin < end:
            return
        for place, demand in needs.items():
            first, last = self._cut(place, begin), self._cut(place, end)
            for free in self._free[place][first:last]:
                for resource, amount in demand.items():
                    if resource in free:
                        free[resource] -= sign * amount

    def first(self, needs: Needs, seconds: float, earliest: float) -> float:
        """The first moment from `earliest` on at which all of it is free for so long; infinity for none."""
        begin = earliest
        while begin < math.inf:
            before = begin
            for place, demand in needs.items():
                begin = self._first(place, demand, seconds, begin)
            if begin == before:
                return begin
        return begin

    def _first(self, place: Spot, demand: Amounts, seconds: float, earliest: float) -> float:
        begins, steps, begin = self._begins[place], self._free[place], earliest
        for index in range(max(0, bisect_right(begins, earliest) - 1), len(steps)):
            if begins[index] >= begin + seconds:
                break
            if any(steps[index].get(resource, math.inf) < amount for resource, amount in demand.items()):
                begin = begins[index + 1] if index + 1 < len(begins) else math.inf
        return begin

    def _cut(self, place: Spot, moment: float) -> int:
        """The index of the step that begins at this moment, made where there is none."""
        begins, steps = self._begins[place], self._free[place]
        if moment == math.inf:
            return len(steps)
        index = bisect_right(begins, moment)
        if index and begins[index - 1] == moment:
            return index - 1
        if index:
            begins.insert(index, moment)
            steps.insert(index, dict(steps[index - 1]))
        return index
