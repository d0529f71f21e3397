"""Times on a public grid: a time counts as the end of its interval, and small intervals are merged."""

from __future__ import annotations

import math

import numpy as np

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.question import Question
from roundtable.core.errors import ConfigError

MOST_INTERVALS = 8192


class TimeGrid:
    """Intervals of the width `every`, open at the left, from 0 to the largest time of a question's column.

    ConfigError for times below 0, an event that has not two values, and a grid that is too fine.
    """

    def __init__(self, question: Question, time: str, event: str, every: float) -> None:
        span = question.number(time)
        if len(question.category(event).values) != 2:
            raise ConfigError(
                f"{question.title}: {event!r} must have two values, first that of the censored, then that of "
                "the event"
            )
        if span.least is None or span.least < 0:
            raise ConfigError(f"{question.title}: times are from 0 on: set least = 0 in [columns.{time}]")
        self.every = every
        self.intervals = math.ceil(float(span.most or 0.0) / every)
        if not 1 <= self.intervals <= MOST_INTERVALS:
            raise ConfigError(
                f"{question.title}: every = {every:g} makes {self.intervals} intervals up to most = "
                f"{span.most:g}; 1 to {MOST_INTERVALS} can be: take a coarser grid"
            )

    def place(self, times: Doubles) -> Doubles:
        """The interval of each time, NaN where it is missing."""
        place: Doubles = np.clip(np.ceil(times / self.every - 1e-9) - 1, 0, self.intervals - 1)
        return place

    def ends(self, starts: list[int]) -> Doubles:
        """The ends of the merged intervals that begin with these."""
        last = [*(start - 1 for start in starts[1:]), self.intervals - 1]
        return (np.array(last) + 1.0) * self.every


def merged(leavers: Doubles, least: int) -> list[int]:
    """The first interval of each merged one: in every group none leaves there, or at least `least`.

    What is left over at the end joins the last one.
    """
    starts, start = [0], 0
    gone = np.zeros(len(leavers))
    fine = True
    for place in range(leavers.shape[1]):
        gone = gone + leavers[:, place]
        fine = bool((least <= gone[gone > 0]).all())
        if fine and place + 1 < leavers.shape[1]:
            start = place + 1
            starts.append(start)
            gone = np.zeros(len(leavers))
    while not fine and len(starts) > 1:
        starts.pop()
        gone = gone + leavers[:, starts[-1] : start].sum(axis=1)
        start = starts[-1]
        fine = bool((least <= gone[gone > 0]).all())
    return starts
