"""Rényi curves: the plain accountant, and the only one for discrete noise."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.charge import Charge

Curve = NDArray[np.float64]


class RenyiUnknown(PrivacyError):
    """No Rényi curve is known for this charge under this relation."""


def renyi_epsilon(charges: Iterable[Charge], delta: float, relation: str) -> float:
    """ε at `delta` by adding Rényi curves over orders 1.1 to 1024.

    Raises `RenyiUnknown` for Poisson sampling under `replace_one`.
    """
    from dp_accounting.rdp import compute_epsilon

    total = sum(charge.steps * _curve(charge.repeated(1), relation) for charge in charges)
    epsilon, _ = compute_epsilon(_orders(), total, delta)
    return float(epsilon)


def _orders() -> Curve:
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    return np.array(DEFAULT_RDP_ORDERS, dtype=np.float64)


@lru_cache(maxsize=1024)
def _curve(charge: Charge, relation: str) -> Curve:
    if charge.mechanism == "skellam":
        return _skellam(charge, relation)
    if charge.mechanism == "discrete_gaussian":
        return _discrete_gaussian(charge, relation)
    return _gaussian(charge, relation)


def _gaussian(charge: Charge, relation: str) -> Curve:
    """dp-accounting's curves. Under replace-one it wants multipliers relative to 2C, as `Charge` has."""
    import dp_accounting as dpa

    z = _multiplier(charge, relation)
    event: dpa.DpEvent = dpa.GaussianDpEvent(z)
    neighbours = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
    if charge.sampling == "poisson" and charge.rate < 1.0:
        if relation == "replace_one":
            raise RenyiUnknown("no Rényi curve is known for Poisson sampling under replacement of one unit")
        event = dpa.PoissonSampledDpEvent(charge.rate, event)
    elif charge.sampling == "fixed_size" and charge.sample < charge.population:
        neighbours = dpa.NeighboringRelation.REPLACE_ONE
        event = dpa.SampledWithoutReplacementDpEvent(charge.population, charge.sample, event)
    accountant = dpa.rdp.RdpAccountant(_orders(), neighbours)
    with _quiet():
        accountant.compose(event)
    return np.asarray(accountant._rdp, dtype=np.float64)


def _skellam(charge: Charge, relation: str) -> Curve:
    """Agarwal, Kairouz & Liu 2021, Corollary 4.1: the Gaussian's αΔ₂²/2μ and a term that vanishes with μ.

    Proven for integer orders; others are bounded by the next integer, as Rényi divergence grows with α.
    """
    order = np.ceil(_orders())
    variance = charge.grid_std**2
    l2 = charge.grid_std / _multiplier(charge, relation)
    l1 = l2 * min(l2, math.sqrt(charge.dimension))
    extra = np.minimum(
        ((2.0 * order - 1.0) * l2 * l2 + 6.0 * l1) / (4.0 * variance**2), 3.0 * l1 / (2.0 * variance)
    )
    return order * l2 * l2 / (2.0 * variance) + extra


def _discrete_gaussian(charge: Charge, relation: str) -> Curve:
    """Kairouz, Liu & Steinke 2021, Theorem 1: ½ε²-concentrated DP, ε² = min(Δ²/nσ² + τd/2, (Δ/√nσ+τ√d)²)."""
    shares = charge.shares
    share_variance = charge.grid_std**2 / shares
    k = np.arange(1, shares, dtype=np.float64)
    tau = 10.0 * float(np.exp(-2.0 * math.pi**2 * share_variance * k / (k + 1.0)).sum())
    base = 1.0 / _multiplier(charge, relation)
    epsilon = min(
        math.sqrt(base * base + tau * charge.dimension / 2.0), base + tau * math.sqrt(charge.dimension)
    )
    return 0.5 * epsilon**2 * _orders()


def _multiplier(charge: Charge, relation: str) -> float:
    halve = relation == "replace_one" and charge.relation == "add_remove"
    return charge.noise_multiplier / 2.0 if halve else charge.noise_multiplier


@contextmanager
def _quiet() -> Iterator[None]:
    """dp-accounting warns of every order that it leaves out; leaving one out only makes the bound larger."""
    logger = logging.getLogger("absl")
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
