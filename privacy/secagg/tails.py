"""Exact tails of a secure-aggregation graph, and the conditions that its degree and threshold must meet.

The graph is Harary's (Bell et al. 2020, section 3): silos on a circle in random order, each joined to
the h = k/2 nearest on either side. `c` silos are corrupt, chosen before the order is known.

**Secrets.** Every honest silo that reveals follows one and the same (U2, U3), and reveals the seed of a
survivor only if that masked among the same U2 (`custody.py`). So of each silo at most one secret comes from
the honest, and the other is safe while fewer than t of its k holders are corrupt: `shares_leak`. That
is n hypergeometric tails; their sum is exactly the expected number of silos with t corrupt holders.

**Cuts.** A lying coordinator names the survivors *after* it has seen the order. The sum over some of the
honest survivors comes out alone only if no edge joins them to the others. Going round the circle, the
honest survivors fall into parts only where h or more places in a row, a *run*, hold none of them.
Let C be one part, l its first silo and r its last: the h places before l and the h places after r are
two runs, apart by at least one place on either side, X and Y of them corrupt. Then

- k − X − Y honest silos of both were named as dropped, at most the d that silos accept: X + Y >= k − d;
- to unmask l takes t of its holders, h of whom lie beyond the run before it: X >= t − h; for r, Y >= t − h.

`falls_apart` is the chance of all three for one pair of runs, which the bivariate hypergeometric
distribution gives exactly, times the n(n − k − 1)/2 pairs. It is 0 where k > c + d.
"""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
import numpy.typing as npt

SECURITY_BITS = 40
CORRECTNESS_BITS = 20
_PRIVACY_BOUND = -(SECURITY_BITS + 1)
"""Of each of the two ways in which privacy may fail."""


def counted(share: float, n: int) -> int:
    """How many of n silos a stated share of them is; rounding noise does not lose one."""
    return math.floor(share * n + 1e-9)


@functools.lru_cache(maxsize=4096)
def upper_tail(n: int, marked: int, drawn: int) -> npt.NDArray[np.float64]:
    """log2 P[X >= x] for x = 0 .. drawn + 1, X the marked among `drawn` of n drawn without replacement."""
    logs = _log_factorials(n)
    x = np.arange(max(0, drawn + marked - n), min(drawn, marked) + 1)
    mass = (
        (logs[marked] - logs[x] - logs[marked - x])
        + (logs[n - marked] - logs[drawn - x] - logs[n - marked - drawn + x])
        - (logs[n] - logs[drawn] - logs[n - drawn])
    ) / math.log(2)
    tail = np.full(drawn + 2, -np.inf)
    tail[x] = np.logaddexp2.accumulate(mass[::-1])[::-1]
    tail[: x[0]] = 0.0
    tail[tail > 0] = 0.0
    return tail


@functools.cache
def _log_factorials(n: int) -> npt.NDArray[np.float64]:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))


def exceeds(n: int, marked: int, drawn: int, at_least: int) -> float:
    """log2 P[X >= at_least], minus infinity where that cannot happen."""
    if at_least > drawn:
        return -math.inf
    return float(upper_tail(n, marked, drawn)[max(at_least, 0)])


def shares_leak(n: int, k: int, t: int, corrupt: int) -> float:
    """log2 of the chance that some silo has t corrupt holders among its k."""
    return math.log2(n) + exceeds(n, corrupt, k, t)


@functools.lru_cache(maxsize=4096)
def falls_apart(n: int, k: int, t: int, corrupt: int, lost: int) -> float:
    """log2 of the chance that `lost` silos, any, cut off honest survivors who can be unmasked."""
    half, logs = k // 2, _log_factorials(n)
    least = max(0, t - half)
    counts = np.arange(least, min(half, corrupt) + 1)
    both = counts[:, None] + counts[None, :]
    here = (both >= k - lost) & (both <= corrupt) & (corrupt - both <= n - k)
    if not here.any():
        return -math.inf
    one, two = np.broadcast_arrays(counts[:, None], counts[None, :])
    others = corrupt - both[here]
    mass = (
        2 * logs[half]
        - sum(logs[x[here]] + logs[half - x[here]] for x in (one, two))
        + (logs[n - k] - logs[others] - logs[n - k - others])
        - (logs[n] - logs[corrupt] - logs[n - corrupt])
    ) / math.log(2)
    return _pairs_of_runs(n, k) + float(np.logaddexp2.reduce(mass))


def disconnects(n: int, k: int, corrupt: int, dropped: int) -> float:
    """log2 of the chance that random dropouts and corruption disconnect the honest survivors."""
    return _pairs_of_runs(n, k) + exceeds(n, corrupt + dropped, k, k)


def too_few_survive(n: int, k: int, t: int, dropped: int) -> float:
    """log2 of the chance that some silo keeps fewer than t of its k holders after random dropouts."""
    return math.log2(n) + exceeds(n, dropped, k, k - t + 1)


def _pairs_of_runs(n: int, k: int) -> float:
    """log2 of the number of pairs of runs of k/2 places with a place or more between them on either side."""
    return math.log2(n * (n - k - 1) / 2)


@functools.lru_cache(maxsize=1024)
def choose_degree(n: int, corrupt: int, dropped: int, malicious: bool) -> tuple[int, int] | None:
    """The smallest (k, t) that meets the conditions, or None where no k < n − 1 does.

    P[t corrupt holders somewhere] <= 2^-41, P[honest survivors fall apart] <= 2^-41, with dropouts at random
    or, against a `malicious` coordinator, of its choice; P[fewer than t survivors somewhere] <= 2^-20.
    """
    for k in range(2, n - 1, 2):
        lowest = max(1, int(np.argmax(math.log2(n) + upper_tail(n, corrupt, k) <= _PRIVACY_BOUND)))
        gone = int(np.argmax(math.log2(n) + upper_tail(n, dropped, k) <= -CORRECTNESS_BITS))
        thresholds = range(lowest, k + 2 - gone)

        def holds(t: int, k: int = k) -> bool:
            cut = falls_apart(n, k, t, corrupt, dropped) if malicious else disconnects(n, k, corrupt, dropped)
            return cut <= _PRIVACY_BOUND

        # The higher the threshold, the less can be cut off.
        if thresholds and holds(thresholds[-1]):
            return k, thresholds[bisect.bisect_left(thresholds, True, key=holds)]
    return None


def most_lost(n: int, k: int, t: int, corrupt: int, dropped: int, at_most: int) -> int:
    """How many silos, from `dropped` to `at_most`, may vanish without cutting the honest survivors in two."""
    allowed = range(dropped, at_most + 1)
    cut = bisect.bisect_left(
        allowed, True, key=lambda lost: falls_apart(n, k, t, corrupt, lost) > _PRIVACY_BOUND
    )
    return allowed[max(cut, 1) - 1]
