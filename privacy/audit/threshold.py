"""Lower bounds on ε and μ from scores of canaries that were in, and of others that were left out.

Whoever says "in" for scores that reach a threshold is right about a share of the canaries that were in
(its true positive rate), and wrong about a share of those that were not. Both rates have exact confidence
bounds, and privacy limits the one by the other (Nasr et al. 2023, sections 4 and 5). Nothing is assumed
of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundtable.core.errors import PrivacyError
from roundtable.privacy.audit.gaussian_bounds import proportion_at_least


@dataclass(frozen=True)
class Rates:
    """What a test is sure to reach: true positives at least, false positives at most."""

    true_positives: float
    false_positives: float

    def epsilon(self, delta: float) -> float:
        """The least ε that allows it at `delta`: TPR ≤ e^ε FPR + δ; 0 where that shows nothing."""
        odds = (self.true_positives - delta) / self.false_positives
        return max(0.0, math.log(odds)) if odds > 0.0 else 0.0

    @property
    def mu(self) -> float:
        """The least μ of Gaussian differential privacy that allows it: Φ⁻¹(TPR) − Φ⁻¹(FPR); 0 for nothing."""
        from scipy import stats

        if self.true_positives == 0.0 or self.false_positives == 1.0:
            return 0.0
        return max(0.0, float(stats.norm.ppf(self.true_positives) - stats.norm.ppf(self.false_positives)))


def threshold_rates(
    inside: NDArray[np.float64], outside: NDArray[np.float64], confidence: float, delta: float = 0.0
) -> Rates:
    """The rates of the best threshold, from scores that are large where a canary was in.

    The threshold is the one with the largest ε at `delta` for every other score; the rates are those of
    the other half, which the choice has not seen. Raises PrivacyError for fewer
    than four scores of either kind.
    """
    if min(len(inside), len(outside)) < 4:
        raise PrivacyError(
            f"{len(inside)} scores of canaries that were in and {len(outside)} of others: four of each is "
            "the least of which one half can choose for the other"
        )
    alpha = 0.5 * (1.0 - confidence)
    candidates = np.quantile(inside[::2], np.linspace(0.02, 0.98, 49))
    best = max(candidates, key=lambda at: _rates(inside[::2], outside[::2], at, alpha).epsilon(delta))
    return _rates(inside[1::2], outside[1::2], float(best), alpha)


def _rates(inside: NDArray[np.float64], outside: NDArray[np.float64], at: float, alpha: float) -> Rates:
    caught = proportion_at_least(int((inside >= at).sum()), len(inside), alpha)
    spared = proportion_at_least(int((outside < at).sum()), len(outside), alpha)
    return Rates(caught, 1.0 - spared)
