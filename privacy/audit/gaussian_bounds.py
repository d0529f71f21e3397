"""Exact confidence bounds for Gaussian noise whose values an auditor sees at many coordinates.

An auditor who knows every contribution subtracts them and has the noise itself: R releases at n coordinates,
each coordinate an independent draw from N(0, Σ). A unit that changes release t by a_t in some direction is
then as hard to tell from its absence as N(0, 1) is from N(μ, 1), with μ² = aᵀ Σ⁻¹ a (Dong, Roth & Su 2022,
μ-GDP; the likelihood ratio is a function of one score, so no attack does better). Σ holds whatever ties the
releases together: noise that is too small, correlated as in DP-FTRL, or used twice.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from roundtable.core.errors import PrivacyError

Matrix = NDArray[np.float64]


def least_mu(noise: Matrix, signal: Matrix, confidence: float) -> float:
    """A lower bound on μ = √(aᵀ Σ⁻¹ a) from noise `[R, n]`, a = `signal` `[R]`; infinite for a singular Σ.

    With W = noise noiseᵀ, (aᵀ Σ⁻¹ a) / (aᵀ W⁻¹ a) has a χ² distribution with n − R + 1 degrees of freedom
    (Muirhead 1982, Theorem 3.2.12), so that its quantile gives an exact bound. Raises PrivacyError for fewer
    coordinates than releases, and for values that are not finite.
    """
    from scipy import stats

    releases, coordinates = noise.shape
    if coordinates < releases or not np.isfinite(noise).all():
        raise PrivacyError(
            f"{coordinates} coordinates of {releases} releases bound no noise: there must be finite values "
            "at no fewer coordinates than releases"
        )
    square = _inverse_form(noise @ noise.T, signal)
    return math.sqrt(square * stats.chi2.ppf(1.0 - confidence, coordinates - releases + 1))


def _inverse_form(wishart: Matrix, signal: Matrix) -> float:
    """aᵀ W⁻¹ a; infinite where a has a part without noise."""
    scale = np.sqrt(np.diag(wishart))
    if (scale == 0.0).any():
        return math.inf
    values, vectors = np.linalg.eigh(wishart / np.outer(scale, scale))
    parts = (vectors.T @ (signal / scale)) ** 2
    # What rounding to float32 leaves of noise that is the same in two releases is no noise.
    none = values <= 1e-9 * values[-1]
    if (parts[none] > 1e-12 * parts.sum()).any():
        return math.inf
    return float((parts[~none] / values[~none]).sum())


def easiest_signs(noise: Matrix) -> Matrix:
    """The signs `[R]` of contributions of norm 1 that stand out most: those of Σ's smallest eigenvector.

    For fresh noise all are alike. Take the bound itself from other coordinates than these.
    """
    scale = np.sqrt(np.maximum(np.diag(noise @ noise.T), np.finfo(np.float64).tiny))
    _, vectors = np.linalg.eigh(noise @ noise.T / np.outer(scale, scale))
    return np.where(vectors[:, 0] >= 0.0, 1.0, -1.0)


def noise_caught(coordinates: int, releases: int, confidence: float, power: float) -> float:
    """The share of the claimed noise below which `least_mu` passes the claimed μ, with this probability."""
    from scipy import stats

    degrees = coordinates - releases + 1
    return math.sqrt(stats.chi2.ppf(1.0 - confidence, degrees) / stats.chi2.ppf(power, degrees))


def least_mean(sums: Matrix, counts: Matrix, deviations: Matrix, degrees: int, confidence: float) -> float:
    """A lower bound on the largest of K means, from independent sums of `counts` `[K]` draws.

    `deviations` `[K]` are those of the sums, whose draws may be correlated; they were estimated with at least
    so many `degrees` of freedom (Student's t; K bounds at once by Bonferroni). The mean of all together is
    another candidate. Sums of no draws do not count.
    """
    from scipy import stats

    seen = counts > 0
    if not seen.any():
        raise PrivacyError("no draw at all: there is nothing to take the mean of")
    alpha = 0.5 * (1.0 - confidence)
    each = stats.t.isf(alpha / seen.sum(), degrees) * deviations[seen] / counts[seen]
    together = stats.t.isf(alpha, degrees) * np.linalg.norm(deviations[seen]) / counts.sum()
    alone = (sums[seen] / counts[seen] - each).max()
    return float(max(alone, sums[seen].sum() / counts.sum() - together))


def least_rate(counts: Matrix, draws: int, confidence: float) -> float:
    """A lower bound on the largest of K probabilities, from `counts` `[K]` of successes in `draws` trials.

    Clopper & Pearson 1934, K bounds at once by Bonferroni; the rate of all is another candidate.
    For samples of a fixed size, where more of one is less of another, the bounds hold with room to spare.
    """
    alpha, units = 0.5 * (1.0 - confidence), len(counts)
    alone = proportion_at_least(int(counts.max()), draws, alpha / units)
    return max(alone, proportion_at_least(int(counts.sum()), draws * units, alpha))


def rate_caught(rate: float, draws: int, units: int, confidence: float, power: float) -> float:
    """The rate of all units from which on `least_rate` passes the claimed `rate`, with this probability."""
    from scipy import stats

    trials = draws * units
    needed = int(stats.binom.isf(0.5 * (1.0 - confidence), trials, rate)) + 1
    return float(stats.beta.ppf(power, needed, trials - needed + 1)) if needed <= trials else 1.0


def proportion_at_least(successes: int, trials: int, alpha: float) -> float:
    """The lower bound of Clopper & Pearson: a lower rate gives so many successes with probability < alpha."""
    from scipy import stats

    return float(stats.beta.ppf(alpha, successes, trials - successes + 1)) if successes else 0.0


def odd_noise(noise: Matrix, confidence: float) -> str:
    """How noise `[R, n]` differs from independent Gaussian draws within its releases, in words, or "".

    Each release's values, over their root mean square, are compared with the normal distribution
    (Kolmogorov & Smirnov, conservative since the scale is estimated), and with themselves at every
    distance (noise that repeats within a release).
    """
    from scipy import stats

    alpha = (1.0 - confidence) / (2 * len(noise))
    for number, values in enumerate(noise, 1):
        scale = math.sqrt(float(np.square(values).mean()))
        if scale == 0.0:
            return f"release {number} has no noise"
        normal = values / scale
        if stats.kstest(normal, "norm").pvalue < alpha:
            return f"the noise of release {number} is not Gaussian"
        distance = _repetition(normal, alpha)
        if distance:
            return f"the noise of release {number} repeats itself after {distance} coordinates"
    return ""


def _repetition(normal: Matrix, alpha: float) -> int:
    """A distance at which values agree with each other, found by their autocorrelation; 0 for none."""
    from scipy import stats

    count = len(normal)
    spectrum = np.fft.rfft(normal, 2 * count)
    correlations = np.fft.irfft(np.square(np.abs(spectrum)), 2 * count)[1:count]
    pairs = np.arange(count - 1, 0, -1)
    # Far apart there are few pairs, for which the sum of products is not yet normal.
    enough = pairs >= 1000
    if not enough.any():
        return 0
    surprise = np.abs(correlations[enough]) / np.sqrt(pairs[enough])
    place = int(surprise.argmax())
    # Products of normal draws have heavier tails than a normal draw: twice the quantile leaves them room.
    return place + 1 if surprise[place] > 2.0 * stats.norm.isf(alpha / (2 * enough.sum())) else 0
