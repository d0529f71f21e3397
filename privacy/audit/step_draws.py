"""Whether a batch is drawn for each step, from how often canaries were in the batches of one round.

A unit that is in each of T steps by a coin of its own of probability q is in k of them with the binomial
distribution, and in both of k (k − 1) / 2 pairs of steps. Where steps share a draw there are up to 1/q times
as many pairs. A lower rate gives fewer, so that it is never taken for a shared draw.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def pairs_of(counts: NDArray[np.int64]) -> int:
    """Σ k (k − 1) / 2 over units and rounds, from in how many steps each was."""
    return int((counts * (counts - 1) // 2).sum())


def log_chance_of_pairs(pairs: int, units: int, steps: int, rate: float) -> float:
    """The logarithm of a bound on the chance of so many pairs or more, from `units` binomial counts.

    Chernoff's bound, which holds for every number of units; 0 where it says nothing.
    """
    from scipy import optimize, special, stats

    most = steps * (steps - 1) // 2
    if pairs >= units * most:
        return units * steps * math.log(rate)
    counts = np.arange(steps + 1)
    weights, values = stats.binom.logpmf(counts, steps, rate), counts * (counts - 1) / 2.0

    def bound(tilt: float) -> float:
        return float(units * special.logsumexp(weights + tilt * values) - tilt * pairs)

    largest = -units * steps * math.log(rate) / (units * most - pairs)
    found = optimize.minimize_scalar(bound, bounds=(0.0, largest), method="bounded", options={"xatol": 1e-9})
    return min(0.0, bound(float(found.x)))


def pairs_refuted(units: int, steps: int, rate: float, confidence: float) -> int:
    """The fewest pairs that refute honest draws with this confidence; more than there can be if none do."""
    alpha = math.log1p(-confidence)
    least, most = 0, units * (steps * (steps - 1) // 2) + 1
    while least < most:
        middle = (least + most) // 2
        if middle < most and log_chance_of_pairs(middle, units, steps, rate) <= alpha:
            most = middle
        else:
            least = middle + 1
    return most


def shared_rate_caught(units: int, steps: int, rate: float, confidence: float, power: float) -> float:
    """The rate from which on batches drawn once a round are caught with this probability; 1 for none."""
    from scipy import stats

    needed = math.ceil(pairs_refuted(units, steps, rate, confidence) / (steps * (steps - 1) // 2))
    return float(stats.beta.ppf(power, needed, units - needed + 1)) if needed <= units else 1.0
