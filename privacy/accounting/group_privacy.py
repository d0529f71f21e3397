"""ε for several units at once: one person's records in a silo, or one person's data at several silos.

Not the bound that holds for any mechanism (k·ε at a δ that grows as e^(kε)): a group of k moves a sum k times
as far, and of a Poisson sample as many of it are drawn as k coins say. That is a mixture of Gaussians, whose
privacy loss is known (Ganesh 2024, "Tight group-level DP guarantees for DP-SGD with sampling via mixture of
Gaussians mechanisms"). What no such result is known for is charged as if the group were in every sample: so
are silos in groups that take turns, whose contributions share rows of correlated noise where these differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.accountants import (
    LEAST_DRAWN_NOISE,
    compose,
    is_drawn,
    merged,
    relation_of,
)
from roundtable.privacy.accounting.charge import Charge

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

LARGEST_GROUP = 1000
_INTERVAL = 1e-3


def group_epsilon(charges: Iterable[Charge], size: int, delta: float) -> float:
    """The ε at `delta` of all charges for a group of `size` units that are there, or other, together.

    PrivacyError for a size below 1 or above `LARGEST_GROUP`.
    """
    if not 1 <= size <= LARGEST_GROUP:
        raise PrivacyError(f"a group of {size}: give a size from 1 to {LARGEST_GROUP}")
    kept = merged(charges)
    if size == 1:
        return compose(kept, delta)
    relation = relation_of(kept)
    drawn = [each for each in kept if relation == "add_remove" and is_drawn(each) and each.groups == 1]
    certain = [_together(each, size, relation) for each in kept if each not in drawn]
    if not drawn:
        return compose(certain, delta)
    gaussian = all(each.mechanism == "gaussian" for each in certain)
    total = sum(each.steps / each.noise_multiplier**2 for each in certain)
    plain = total**-0.5 if total else math.inf
    if not gaussian or plain < LEAST_DRAWN_NOISE:
        return compose(certain, delta / 2) + _drawn_epsilon(drawn, math.inf, size, delta / 2)
    return _drawn_epsilon(drawn, plain, size, delta)


def _together(charge: Charge, size: int, relation: str) -> Charge:
    """The charge where the whole group is in every sample."""
    twice = 2 if relation == "replace_one" and charge.relation == "add_remove" else 1
    parts = tuple((name, z / (size * twice)) for name, z in charge.parts)
    return replace(
        charge, sampling="none", rate=1.0, groups=1, sample=0, population=0, parts=parts, relation=relation
    )


def _drawn_epsilon(drawn: Sequence[Charge], plain: float, size: int, delta: float) -> float:
    """Of sampled steps, and of one Gaussian of multiplier `plain` beside them."""
    from dp_accounting.pld import privacy_loss_distribution

    total: PrivacyLossDistribution | None = None
    if math.isfinite(plain):
        total = privacy_loss_distribution.from_gaussian_mechanism(
            plain, value_discretization_interval=_INTERVAL
        )
    for charge in drawn:
        one = _mixture(charge.noise_multiplier, charge.rate, size)
        many = one.self_compose(charge.steps) if charge.steps > 1 else one
        total = many if total is None else total.compose(many)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _mixture(noise_multiplier: float, rate: float, size: int) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution
    from scipy.stats import binom

    counts = range(size + 1)
    chances = [float(binom.pmf(count, size, rate)) for count in counts]
    return privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise_multiplier,
        [float(count) for count in counts],
        [chance / math.fsum(chances) for chance in chances],
        value_discretization_interval=_INTERVAL,
    )
