"""A lower bound on ε from one training run with canaries (Steinke, Nasr & Jagielski 2023).

Each canary is in the data or not by a fair coin. Whoever guesses the coins from what was published
can be right only so often if the claim holds; being right more often refutes it. The bound says
nothing about how far below the truth it lies: a claim that survives is not thereby proven.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundtable.core.errors import PrivacyError


@dataclass(frozen=True)
class Audit:
    """`epsilon` is a lower bound at `delta` with the given confidence; `right` of `guesses` were right."""

    epsilon: float
    delta: float
    confidence: float
    guesses: int
    right: int


def one_run_audit(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    guesses: int,
    delta: float,
    confidence: float = 0.95,
) -> Audit:
    """Guesses `included` for the `guesses` / 2 highest scores and `not included` for as many lowest.

    `scores` `[m]` are large where a canary seems to have been in the data; `guesses` is fixed beforehand, not
    chosen by the result. Theorem 5.2 of the paper, inverted by bisection.
    """
    if not 2 <= guesses <= len(scores) or len(scores) != len(included):
        raise PrivacyError(
            f"{guesses} guesses about {len(scores)} canaries, of which {len(included)} are known"
        )
    order = np.argsort(scores)
    lowest, highest = order[: guesses // 2], order[len(order) - guesses // 2 :]
    made = 2 * (guesses // 2)
    right = int((~included[lowest]).sum() + included[highest].sum())
    low, high = 0.0, 50.0
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        if _p_value(len(scores), made, right, middle, delta) < 1.0 - confidence:
            low = middle
        else:
            high = middle
    return Audit(low, delta, confidence, made, right)


def _p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if (ε, δ) is true (Theorem 5.2)."""
    from scipy import stats

    binomial = stats.binom(guesses, 1.0 / (1.0 + math.exp(-epsilon)))
    tail = np.cumsum(binomial.pmf(np.arange(right - 1, -1, -1)))
    alpha = float((tail / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, float(binomial.sf(right - 1)) + 2.0 * canaries * delta * alpha)
