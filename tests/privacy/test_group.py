"""ε for several records, or silos, of one person: against direct integration, and against the crude bound."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from roundtable.core.errors import PrivacyError
from roundtable.privacy import Charge, compose, gaussian_charge, local_gaussian_charge
from roundtable.privacy.accounting.accountants import gaussian_epsilon
from roundtable.privacy.accounting.group_privacy import group_epsilon


def sampled(noise: float, rate: float, steps: int = 1) -> Charge:
    return gaussian_charge("example", {"sampling": "poisson", "rate": rate}, noise, steps=steps)


def by_integration(noise: float, rate: float, size: int, delta: float) -> float:
    """ε of one step, from the densities alone: the group is there, as many as its coins say, or is not."""
    grid = np.linspace(-30 * noise, size + 30 * noise, 60_001)
    there = sum(binom.pmf(count, size, rate) * norm.pdf(grid, count, noise) for count in range(size + 1))
    absent = norm.pdf(grid, 0.0, noise)

    def excess(epsilon: float) -> float:
        one = np.trapezoid(np.maximum(there - math.exp(epsilon) * absent, 0.0), grid)
        other = np.trapezoid(np.maximum(absent - math.exp(epsilon) * there, 0.0), grid)
        return float(max(one, other)) - delta

    return float(brentq(excess, 1e-6, 60.0))


@pytest.mark.parametrize(("noise", "rate", "size"), [(1.0, 0.01, 2), (1.5, 0.1, 4)])
def test_one_step_is_what_the_densities_give(noise: float, rate: float, size: int) -> None:
    found = group_epsilon([sampled(noise, rate)], size, 1e-5)
    truth = by_integration(noise, rate, size, 1e-5)
    assert truth - 1e-6 <= found <= truth + 2e-3


def test_without_a_draw_a_group_moves_the_sum_that_much_further() -> None:
    plain = gaussian_charge("client", {"sampling": "none"}, 6.0, steps=4)
    assert group_epsilon([plain], 3, 1e-6) == pytest.approx(gaussian_epsilon(6.0 / 3 / 2, 1e-6))
    assert group_epsilon([local_gaussian_charge(6.0)], 3, 1e-6) == pytest.approx(
        gaussian_epsilon(6.0 / 2 / 3, 1e-6)
    )
    whole = gaussian_charge("example", {"sampling": "poisson", "rate": 1.0}, 6.0, steps=4)
    assert group_epsilon([whole], 3, 1e-6) == pytest.approx(gaussian_epsilon(1.0, 1e-6))


def test_silos_in_groups_that_take_turns_are_charged_as_if_drawn_every_time() -> None:
    """Their contributions share rows of the correlated noise: no mixture of Gaussians is known for them."""
    turns = Charge("gaussian", "client", "poisson", (("update", 6.0),), steps=4, rate=0.2, groups=3)
    assert group_epsilon([turns], 1, 1e-6) == compose([replace(turns, groups=1)], 1e-6)
    assert group_epsilon([turns], 2, 1e-6) == pytest.approx(gaussian_epsilon(6.0 / 2 / 2, 1e-6))
    assert group_epsilon([turns], 2, 1e-6) > group_epsilon([replace(turns, groups=1)], 2, 1e-6)
    assert Charge.from_json(turns.to_json()) == turns
    c = np.array([1.0, 0.5, 0.4])
    rows = [np.convolve(np.eye(12)[t], c)[:12] for t in range(4)]
    assert rows[0] @ rows[3] == 0.0, "of one group"
    assert rows[0] @ rows[1] > 0.0, "of two"


def test_it_is_below_the_bound_for_any_mechanism() -> None:
    charges, delta, size = [sampled(1.2, 0.02, 50)], 1e-6, 3
    one = compose(charges, delta)
    assert group_epsilon(charges, 1, delta) == one
    found = group_epsilon(charges, size, delta)
    assert one < found
    # (k ε', k e^((k-1) ε') δ') for the δ' that comes to the same: a larger ε' needs a smaller one.
    crude = one
    for _ in range(4):
        crude = compose(charges, delta / (size * math.exp((size - 1) * crude)))
    assert found < 0.85 * size * crude


def test_where_no_theorem_is_known_nobody_counts_as_drawn() -> None:
    fixed = gaussian_charge("client", {"sampling": "fixed_size", "sample": 5, "population": 100}, 8.0)
    assert group_epsilon([fixed], 2, 1e-6) == pytest.approx(gaussian_epsilon(8.0 / 2 / 2, 1e-6))
    coins = gaussian_charge("client", {"sampling": "poisson", "rate": 0.1}, 8.0)
    both = group_epsilon([fixed, coins], 2, 1e-6)
    assert both == pytest.approx(gaussian_epsilon(8.0 / 2 / 2 / 2**0.5, 1e-6)), "replacement of all, in each"
    discrete = Charge("skellam", "client", "none", (("update", 8.0),), grid_std=1e5, dimension=10)
    mixed = group_epsilon([discrete, coins], 2, 1e-6)
    assert mixed > group_epsilon([coins], 2, 1e-6)
    assert group_epsilon([discrete], 2, 1e-6) == pytest.approx(
        compose([discrete.scaled(4.0)], 1e-6), rel=1e-6
    )


@pytest.mark.parametrize("size", [0, -1, 1001])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(PrivacyError, match=f"a group of {size}: give a size from 1 to 1000"):
        group_epsilon([], size, 1e-6)
