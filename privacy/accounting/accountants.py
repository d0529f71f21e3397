"""ε at δ for any list of charges: privacy-loss distributions, Rényi, and Opacus's PRV as a cross-check.

Equal charges are merged and Gaussians without sampling are combined exactly (their privacy is that of
one Gaussian with Σ z⁻² of the whole, and the analytic formula of Balle & Wang 2018). Discrete noise is known
only as Rényi curves, and to Opacus's accountant so are samples of a fixed size. Where one list mixes both
kinds, the smaller of two valid bounds is taken: everything by Rényi, or δ shared between the two groups.

dp-accounting and Opacus are imported on first use: an agent or a command line that never computes an
ε does not pay for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ACCOUNTANTS
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.accounting.fixed_size import LEAST_NOISE, fixed_size_loss
from roundtable.privacy.accounting.renyi import RenyiUnknown, renyi_epsilon

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_COARSE, _FINE = 1e-3, 1e-4
LEAST_DRAWN_NOISE = 0.15
"""Under less noise a step's ε is above forty, and its loss distribution takes minutes: a Poisson sample is
then charged as everybody, which bounds it."""


def compose(charges: Iterable[Charge], delta: float, accountant: str = "pld") -> float:
    """The ε at `delta` of everything that the charges describe, in whatever order they came.

    The neighbouring relation is `relation_of(charges)`. Raises `PrivacyError` for charges of different
    units, a δ outside (0, 1) or an unknown accountant. An empty list costs 0.
    """
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(
            f"the accountant {accountant!r} is unknown; choose one of {', '.join(ACCOUNTANTS)}"
        )
    if not 0.0 < delta < 1.0:
        raise PrivacyError(f"delta is {delta}: it must be above 0 and below 1")
    return _compose(merged(charges), delta, accountant)


def merged(charges: Iterable[Charge]) -> tuple[Charge, ...]:
    """The same spending with equal charges added up, in a canonical order."""
    steps: dict[Charge, int] = {}
    for charge in charges:
        one = charge.repeated(1)
        steps[one] = steps.get(one, 0) + charge.steps
    kept = [charge.repeated(count) for charge, count in steps.items() if count]
    if len(units := {charge.unit for charge in kept}) > 1:
        raise PrivacyError(f"charges of different units cannot be composed: {', '.join(sorted(units))}")
    return tuple(sorted(kept, key=Charge.to_json))


def relation_of(charges: Iterable[Charge]) -> str:
    """`replace_one` where any charge is only known under it, else `add_remove`."""
    return "replace_one" if any(charge.relation == "replace_one" for charge in charges) else "add_remove"


@lru_cache(maxsize=4096)
def _compose(charges: tuple[Charge, ...], delta: float, accountant: str) -> float:
    if not charges:
        return 0.0
    relation = relation_of(charges)
    numeric = tuple(charge for charge in charges if _has_loss_distribution(charge, accountant))
    renyi = tuple(charge for charge in charges if charge not in numeric)
    bounds = []
    if accountant == "rdp" or renyi:
        try:
            bounds.append(renyi_epsilon(charges, delta, relation))
        except RenyiUnknown:
            accountant = "pld" if accountant == "rdp" else accountant
    if accountant != "rdp" and not renyi:
        bounds.append(_numeric_epsilon(numeric, delta, relation, accountant))
    elif accountant != "rdp" and numeric:
        half = delta / 2.0
        bounds.append(
            renyi_epsilon(renyi, half, relation) + _numeric_epsilon(numeric, half, relation, accountant)
        )
    return min(bounds)


def _has_loss_distribution(charge: Charge, accountant: str) -> bool:
    return charge.mechanism == "gaussian" and (charge.sampling != "fixed_size" or accountant == "pld")


def _numeric_epsilon(charges: Sequence[Charge], delta: float, relation: str, accountant: str) -> float:
    plain, sampled = _plain_multiplier(charges, relation), [c for c in charges if _amplified(c)]
    if not sampled:
        return gaussian_epsilon(plain, delta)
    if plain < LEAST_DRAWN_NOISE:
        # Its loss distribution would take too long; δ shared between the two is a bound as well.
        half = delta / 2.0
        return gaussian_epsilon(plain, half) + _sampled_epsilon(math.inf, sampled, half, relation, accountant)
    return _sampled_epsilon(plain, sampled, delta, relation, accountant)


def _sampled_epsilon(
    plain: float, sampled: Sequence[Charge], delta: float, relation: str, accountant: str
) -> float:
    if accountant == "prv":
        return _prv_epsilon(plain, sampled, delta, relation)
    coarse = _distribution_epsilon(plain, sampled, delta, relation, _COARSE)
    steps = sum(charge.steps for charge in sampled)
    if coarse >= 1.0 and steps * _COARSE**2 < 2e-4 * coarse:
        return coarse
    return _distribution_epsilon(plain, sampled, delta, relation, _FINE)


def _distribution_epsilon(
    plain: float, sampled: Sequence[Charge], delta: float, relation: str, interval: float
) -> float:
    """An upper bound whatever the interval; the coarse one is eight times as fast."""
    total: PrivacyLossDistribution | None = None
    if math.isfinite(plain):
        total = _loss_distribution(plain, 1.0, "add_remove", interval)
    for charge in sampled:
        one = sampled_loss(charge, relation, interval)
        many = one.self_compose(charge.steps) if charge.steps > 1 else one
        total = many if total is None else total.compose(many)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


def sampled_loss(charge: Charge, relation: str, interval: float) -> PrivacyLossDistribution:
    """The loss of one step of a charge, on a grid of `interval`: an upper bound whatever that is."""
    if charge.sampling == "fixed_size":
        return fixed_size_loss(charge.noise_multiplier, charge.sample / charge.population, interval)
    return _loss_distribution(charge.noise_multiplier, charge.rate, relation, interval)


def _amplified(charge: Charge) -> bool:
    if charge.sampling == "fixed_size":
        return charge.sample < charge.population and charge.noise_multiplier >= LEAST_NOISE
    return is_drawn(charge)


def is_drawn(charge: Charge) -> bool:
    """Whether Poisson sampling amplifies the charge, as far as that is reckoned."""
    drawn = charge.sampling == "poisson" and charge.rate < 1.0
    return drawn and charge.noise_multiplier >= LEAST_DRAWN_NOISE


def _plain_multiplier(charges: Iterable[Charge], relation: str) -> float:
    """One multiplier for all Gaussians that nothing amplifies: (Σ steps / z²)^(-½), ∞ where there is none."""
    total = sum(
        charge.steps / in_relation(charge, relation) ** 2.0 for charge in charges if not _amplified(charge)
    )
    return total**-0.5 if total else math.inf


def in_relation(charge: Charge, relation: str) -> float:
    """A charge's multiplier under `relation`: replacing a unit moves a sum twice as far as removing it."""
    halve = relation == "replace_one" and charge.relation == "add_remove"
    return charge.noise_multiplier / 2.0 if halve else charge.noise_multiplier


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact ε of one Gaussian release (Balle & Wang 2018, Theorem 8)."""
    if math.isinf(noise_multiplier):
        return 0.0
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise_multiplier, delta))


@lru_cache(maxsize=64)
def _loss_distribution(
    noise_multiplier: float, rate: float, relation: str, interval: float
) -> PrivacyLossDistribution:
    """One step's distribution. Under replace-one dp-accounting wants σ over C, as here for add-remove."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    neighbours = (
        NeighboringRelation.REPLACE_ONE
        if relation == "replace_one"
        else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=neighbours,
    )


def _prv_epsilon(plain: float, sampled: Sequence[Charge], delta: float, relation: str) -> float:
    if relation == "replace_one":
        raise PrivacyError("the PRV accountant knows only add-remove neighbours; use accountant 'pld'")
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(charge.noise_multiplier, charge.rate, charge.steps) for charge in sampled]
    if math.isfinite(plain):
        accountant.history.append((plain, 1.0, 1))
    return float(np.asarray(accountant.get_epsilon(delta)))
