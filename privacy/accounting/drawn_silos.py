"""ε of one record over the draw of silos: a silo that is not drawn does not train, and spends nothing.

In each round a silo is drawn with probability q, by a coin that depends on no data. Drawn, it runs a
mechanism of its own, K steps of DP-SGD, and what is published depends on the record through these rounds
alone. Of T rounds it is drawn in N ~ Bin(T, q), and by joint convexity of the hockey-stick divergence

    δ(ε) ≤ Σₙ P(N = n) δₙ(ε),    δₙ that of n rounds composed.

It holds against everybody who does not choose the draw, whether or not they learn its outcome. More is not
true: amplification by subsampling, ε' = ln(1 + q (e^ε − 1)) at q δ (Balle, Barthe & Gaboardi 2018; for any
dominating pair Zhu, Dong & Wang 2022, Theorem 11), is of a unit whose absence from the sample leaves the same
as its absence from the data. Here a silo that is not drawn takes its other records along. Where its part of
a model can be recognised, which no noise in its own training prevents, one release in each round attains the
bound above, which lies above the amplified one. Secure aggregation and the noise of other silos may hide the
part to some degree; but that depends on how others train, and nothing bounds the length of a silo's update.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.accountants import LEAST_DRAWN_NOISE, compose, sampled_loss
from roundtable.privacy.accounting.charge import Charge

_INTERVAL = 1e-3
# Numbers of rounds between two of these are charged as the greater.
_COUNTS = 24
_PRECISION = 1e-4
# Of δ: being drawn oftener than is composed here counts as everything lost.
_REST = 1e-3


@lru_cache(maxsize=64)
def epsilon_over_draws(charge: Charge, probability: float, rounds: int, delta: float) -> float:
    """An upper bound on ε at `delta` of `rounds` rounds that cost `charge` each, if the silo is drawn.

    Raises `PrivacyError` for a probability outside (0, 1], and a charge that is no step of DP-SGD.
    """
    if not 0.0 < probability <= 1.0:
        raise PrivacyError(f"a silo is drawn with probability {probability}: it must be above 0, at most 1")
    if (charge.mechanism, charge.unit, charge.relation) != ("gaussian", "example", "add_remove"):
        raise PrivacyError("the draw of silos is only accounted for DP-SGD inside them")
    always = compose([charge.repeated_by(rounds)], delta)
    if probability == 1.0 or always == 0.0 or charge.noise_multiplier < LEAST_DRAWN_NOISE:
        return always
    counts, chances, rest = _times_drawn(probability, rounds, delta * _REST)
    one = sampled_loss(charge, "add_remove", _INTERVAL)
    composed = [
        (chance, one.self_compose(count * charge.steps) if count * charge.steps > 1 else one)
        for count, chance in zip(counts, chances, strict=True)
        if count
    ]
    low, high = 0.0, always
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if (
            rest + sum(chance * float(loss.get_delta_for_epsilon(middle)) for chance, loss in composed)
            <= delta
        ):
            high = middle
        else:
            low = middle
    return high


def _times_drawn(probability: float, rounds: int, rest: float) -> tuple[list[int], list[float], float]:
    """Some numbers of rounds, how likely one up to each and above the last is, and what is left above all."""
    from scipy.stats import binom

    most = min(rounds, int(binom.isf(rest, rounds, probability)))
    likely = int(binom.ppf(rest, rounds, probability))
    counts = sorted({*np.linspace(likely, most, _COUNTS).round().astype(int).tolist(), 0})
    upto = np.asarray(binom.cdf(counts, rounds, probability))
    return counts, np.diff(upto, prepend=0.0).tolist(), float(binom.sf(most, rounds, probability))
