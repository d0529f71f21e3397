"""Rounds on quadratics against theory: each slope, each floor and each bound (docs/convergence.md)."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def measure(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "examples" / "convergence"))
    return importlib.import_module("measure")


def within(dots, measure):
    """The measured figures in the order of what was varied, none above its bound."""
    assert len(dots) > 1
    for dot in dots:
        assert dot.measured <= dot.bound * measure.CHANCE, dot
    return [dot.measured for dot in dots]


def test_synchronous_steps_contract_by_one_minus_mu_eta(measure):
    for dot in measure.synchronous_rate((0.1, 0.4)):
        assert math.log(dot.measured) == pytest.approx(math.log(dot.bound), rel=0.01)


def test_noise_leaves_a_floor_that_grows_as_the_rate(measure):
    dots = measure.noise_floor((0.1, 0.2, 0.4))
    for dot, measured in zip(dots, within(dots, measure), strict=True):
        # Worked out exactly: half of the places have each curvature.
        exact = sum(dot.at / (2 * h * (2 - dot.at * h)) for h in (measure.MU, measure.LARGEST))
        assert measured == pytest.approx(exact, rel=0.05)
    assert measure.slope(dots) == pytest.approx(1.0, abs=0.15)


def test_drift_grows_as_the_square_of_the_local_steps(measure):
    dots = measure.drift((1, 2, 4, 8))
    within(dots, measure)
    assert measure.slope(dots[:4]) == pytest.approx(2.0, abs=0.1)
    # Noise adds up as the steps, and the spread as their square.
    assert 1.4 < measure.slope(dots[4:]) < 1.8


def test_where_fedavg_ends_is_off_as_the_square_of_the_further_steps(measure):
    dots = measure.fixed_point((2, 4, 8))
    within(dots, measure)
    assert measure.slope(dots) == pytest.approx(2.0, abs=0.1)


def test_scaffold_ends_at_the_minimum_however_clients_differ(measure):
    """FedAvg's floor grows as the square of the spread."""
    dots = measure.heterogeneity((1.0, 10.0))
    within(dots, measure)
    assert measure.slope(dots[:2]) == pytest.approx(2.0, abs=0.01)
    assert all(
        averaged.measured > 1e8 * controlled.measured
        for averaged, controlled in zip(dots[:2], dots[2:], strict=True)
    )


def test_a_stale_gradient_is_off_as_the_square_of_the_delay_and_discounts_help(measure):
    plain, linear, polynomial, hinge = measure.DISCOUNTS
    dots = {name: measure.stale_gradients((1, 2), names=[name]) for name in (plain, polynomial)}
    assert measure.slope(dots[plain]) == pytest.approx(2.0, abs=0.3)
    found = {name: within(points, measure) for name, points in dots.items()}
    # Below the bound of what is not discounted, too: by (1 + τ)^-1, the square of the factor.
    ratios = [less / more for less, more in zip(found[polynomial], found[plain], strict=True)]
    assert ratios == pytest.approx([1 / 2, 1 / 3], rel=0.15)
    assert measure.factor_of(linear, 4) == pytest.approx(1 / 1.4)
    assert measure.factor_of(hinge, 4) == pytest.approx(1 / 2)


def test_delay_raises_the_floor_within_its_bound(measure):
    plain = next(iter(measure.DISCOUNTS))
    none, some = within(measure.stale_floor((0, 4), names=[plain]), measure)
    assert some > 1.3 * none


def test_a_delay_beyond_what_is_stable_needs_a_discount(measure):
    """Delayed steps are stable for η L below 2 sin(π/(4τ + 2)): 0.184 at τ = 8."""
    plain, *_, hinge = measure.DISCOUNTS
    limit = 2 * math.sin(math.pi / 34)
    rate = 1.3 * limit
    assert rate * measure.factor_of(hinge, 8) < limit
    ends = [measure.squared(measure.delayed(1.0, 250, 8, rate, name, 0.0))[-1] for name in (plain, hinge)]
    assert ends[0] > 1.0 > 0.01 > ends[1]
