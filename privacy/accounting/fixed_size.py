"""The privacy loss of Gaussian noise on a sample of a fixed size, drawn without replacement.

For neighbours that replace one of n units and a sample of m of them, γ = m/n, Balle, Barthe & Gaboardi 2018
(Theorem 9) bound the hockey-stick divergence of the sampled mechanism by that of the plain one, tightly:

    H_α(M(D) ‖ M(D')) ≤ γ H_α₀(P ‖ Q)   for α = 1 + γ (α₀ − 1) ≥ 1,

with P, Q the Gaussians that replacement moves furthest apart. The relation is symmetric, so that for α < 1
the bound follows from H_α(X ‖ Y) = 1 − α + α H_1/α(Y ‖ X). Both together are a convex function that some pair
of distributions has as its divergence (Zhu, Dong & Wang 2022, Proposition 8), and a pair that dominates every
round dominates their composition (ibid., Theorem 10): what Lebeda et al. 2024 warn of, composing the pair of
one direction alone, does not arise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# Beyond so many standard deviations a Gaussian has a mass of 1e-23.
_TAIL = 10.0
LEAST_NOISE = 0.25
"""Under less noise (over 2C) a step's loss is dozens, and a sample of any use is charged as everybody."""


@lru_cache(maxsize=64)
def fixed_size_loss(noise_multiplier: float, rate: float, interval: float) -> PrivacyLossDistribution:
    """The loss of one step, on a grid of `interval`: an upper bound whatever that is.

    `noise_multiplier` is the standard deviation over what replacing a unit moves (2C), `rate` is m/n.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    shift = 1.0 / noise_multiplier
    greatest = np.log1p(rate * np.expm1(shift * shift / 2.0 + shift * _TAIL))
    points = int(np.ceil(greatest / interval)) + 1
    grid = np.arange(-points, points + 1, dtype=np.float64) * interval
    deltas = hockey_stick(np.asarray(grid, dtype=np.float64), noise_multiplier, rate)
    # Rounding may make a divergence grow in its last digits: it is raised to what follows, never lowered.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    # Doroshenko et al. 2022 join the points of a convex function by lines, which lie above it.
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -points, points, deltas)
    return PrivacyLossDistribution(pmf)


def hockey_stick(epsilons: NDArray[np.float64], noise_multiplier: float, rate: float) -> NDArray[np.float64]:
    """The bound on H_α at α = e^ε, for each ε of either sign."""
    size = np.abs(epsilons)
    above = rate * _gaussian(np.log1p(np.expm1(size) / rate), noise_multiplier)
    below = -np.expm1(-size) + np.exp(-size) * above
    return np.clip(np.where(epsilons < 0.0, below, above), 0.0, 1.0)


def _gaussian(epsilons: NDArray[np.float64], noise_multiplier: float) -> NDArray[np.float64]:
    """δ at ε ≥ 0 of one Gaussian (Balle & Wang 2018, Theorem 5)."""
    from scipy.special import log_ndtr, ndtr

    shift = 1.0 / noise_multiplier
    middle = -epsilons / shift
    values = ndtr(middle + shift / 2.0) - np.exp(epsilons + log_ndtr(middle - shift / 2.0))
    return np.asarray(values, dtype=np.float64)
