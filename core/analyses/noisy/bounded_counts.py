"""The score of Poisson's likelihood with a bound that does not grow with the largest count there may be.

A row of a count y and mean m adds t ψ(y, m) to the gradient, ψ = max(−c, min(c, y − k(m))): the residual, but
no row moves it further than c. k(m) is where E ψ = 0 for a Poisson count of mean m, so that estimates are
those of the model whatever c is (Cantoni & Ronchetti 2001, Robust Inference for Generalized Linear Models,
section 2: Fisher consistency of the quasi-likelihood with Huber's ψ). As E[y g(y)] = m E[g(y + 1)], a row's
weight in the Hessian is E[ψ y] = m E[ψ(y + 1)]; it is no less than the variance of ψ, since both rise with y.
With c beyond all counts these are y − m and m.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.scipy_parts import special

_KNOTS = 400
_HALVINGS = 30
_LEAST_MEAN = 1e-3
_LEAST_BOUND = 1e-3


def _above(mean: Doubles, end: Doubles) -> Doubles:
    """E max(0, y − end)."""
    whole = np.floor(end)
    # E y 1(y > k) = m P(y ≥ k), and P(y > k) is pdtrc(k, m).
    reached = np.where(whole < 1, 1.0, special.pdtrc(np.maximum(whole - 1, 0), mean))
    passed = np.where(whole < 0, 1.0, special.pdtrc(np.maximum(whole, 0), mean))
    found: Doubles = mean * reached - end * passed
    return found


def expected(mean: Doubles, center: Doubles, bound: float) -> Doubles:
    """E max(−bound, min(bound, y − center)) of Poisson counts y."""
    low, high = center - bound, center + bound
    # y cut to [low, high] is low + (y − low)₊ − (y − high)₊.
    found: Doubles = low + _above(mean, low) - _above(mean, high) - center
    return found


class BoundedScore:
    """ψ and its weight for means up to `most`, by a table of means."""

    def __init__(self, bound: float, most: float) -> None:
        self.bound = max(bound, _LEAST_BOUND)
        self.means = np.geomspace(min(_LEAST_MEAN, most / 2), most, _KNOTS)
        low, high = self.means - self.bound, self.means + self.bound
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            rises = expected(self.means, middle, self.bound) > 0
            low, high = np.where(rises, middle, low), np.where(rises, high, middle)
        center = (low + high) / 2
        self._shift = center - self.means
        self._share = np.clip(expected(self.means, center - 1.0, self.bound), 0.0, 1.0)

    def at(self, counts: Doubles, means: Doubles) -> tuple[Doubles, Doubles]:
        """(ψ, weight) of counts with these means; |ψ| is no more than the bound."""
        shift = np.interp(means, self.means, self._shift)
        weight = means * np.interp(means, self.means, self._share)
        return np.clip(counts - means - shift, -self.bound, self.bound), weight


@lru_cache(maxsize=16)
def bounded_score(bound: float, most: float) -> BoundedScore:
    """The score of a bound, which all steps of a fit have in common."""
    return BoundedScore(bound, most)
