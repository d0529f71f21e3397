"""Hypergeometric tails and the failure conditions of a secure-aggregation graph (Bell et al. 2020).

The graph is Harary's: silos on a circle in random order, each joined to the k/2 nearest on either
side. `c` silos are corrupt, chosen before the order is known; any d may drop out.

`choose_degree` uses the paper's conditions. Against a lying coordinator one more is demanded, which
holds for dropouts chosen *after* the order is known: the honest survivors fall apart only if two
separate runs of k/2 neighbours on the circle hold nobody honest and alive. So much happens only if
the k silos of two such runs hold either

- at least k − d corrupt ones (everybody else of them dropped), or
- at least 2t − k corrupt ones, for the survivors beside a run need t shares of their self masks, and
  at most k/2 come from their other side.

Each is a hypergeometric tail times the n(n − 1)/2 pairs of runs.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

SECURITY_BITS = 40
CORRECTNESS_BITS = 20


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


def shares_leak(n: int, k: int, t: int, corrupt: int, malicious: bool) -> float:
    """log2 of the chance that some silo's secrets come within reach of the corrupt among its k holders.

    Semi-honest: t corrupt holders. Malicious: enough of them, told two stories through the honest
    rest, for both kinds of share: 2t <= k + corrupt holders.
    """
    return math.log2(n) + exceeds(n, corrupt, k, 2 * t - k if malicious else t)


def falls_apart(n: int, k: int, corrupt: int, dropped: int) -> float:
    """log2 of the chance that `dropped` silos, whoever they are, cut the honest survivors in two."""
    return _pairs_of_runs(n) + exceeds(n, corrupt, k, k - dropped)


def falls_apart_unmasked(n: int, k: int, t: int, corrupt: int) -> float:
    """log2 of the chance that any dropouts cut the honest survivors in two and both can be unmasked."""
    return _pairs_of_runs(n) + exceeds(n, corrupt, k, 2 * t - k)


def disconnects(n: int, k: int, corrupt: int, dropped: int) -> float:
    """log2 of the chance that random dropouts and corruption disconnect the honest survivors."""
    return _pairs_of_runs(n) + exceeds(n, corrupt + dropped, k, k)


def too_few_survive(n: int, k: int, t: int, dropped: int) -> float:
    """log2 of the chance that some silo keeps fewer than t of its k holders after random dropouts."""
    return math.log2(n) + exceeds(n, dropped, k, k - t + 1)


def _pairs_of_runs(n: int) -> float:
    return math.log2(n * (n - 1) / 2)


def choose_degree(n: int, corrupt: int, dropped: int, malicious: bool) -> tuple[int, int] | None:
    """The smallest (k, t) that meets the paper's conditions, or None where no k < n − 1 does.

    P[disconnected] < 2^-41, P[A > t1] <= 2^-41 / n, P[S < t] <= 2^-20 / n, with A the corrupt and S
    the surviving holders of a silo; against a malicious coordinator t1 becomes
    ceil((t1 + k − 1.25) / 2); t = t1 + 1.
    """
    bound = -(SECURITY_BITS + 1)
    for k in range(2, n - 1, 2):
        most = int(np.argmax(upper_tail(n, corrupt, k) + math.log2(n) <= bound)) - 1
        t = (math.ceil((most + k - 1.25) / 2) if malicious else most) + 1
        if t < 1 or t > k or too_few_survive(n, k, t, dropped) > -CORRECTNESS_BITS:
            continue
        if disconnects(n, k, corrupt, dropped) >= bound:
            continue
        if malicious and min(_adaptive(n, k, t, corrupt, dropped)) > bound:
            continue
        return k, t
    return None


def _adaptive(n: int, k: int, t: int, corrupt: int, dropped: int) -> tuple[float, float]:
    return falls_apart(n, k, corrupt, dropped), falls_apart_unmasked(n, k, t, corrupt)
