"""The bounds hold as often as they say, come close, and see noise that is too small, shared or repeated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from roundtable.core.errors import PrivacyError
from roundtable.privacy.audit.canary_job import CanaryTraces
from roundtable.privacy.audit.gaussian_bounds import (
    easiest_signs,
    least_mean,
    least_mu,
    least_rate,
    noise_caught,
    odd_noise,
    rate_caught,
)
from roundtable.privacy.audit.report import change_by_one
from roundtable.privacy.audit.step_draws import (
    log_chance_of_pairs,
    pairs_of,
    pairs_refuted,
    shared_rate_caught,
)
from roundtable.privacy.audit.threshold import Rates, threshold_rates

COVARIANCE = np.array([[1.0, -0.5, 0.1], [-0.5, 1.5, -0.4], [0.1, -0.4, 2.0]])
ONES = np.ones(3)


def test_the_bound_on_mu_is_passed_as_often_as_it_says_and_is_tight() -> None:
    rng, root = np.random.default_rng(1), np.linalg.cholesky(COVARIANCE)
    true = math.sqrt(ONES @ np.linalg.solve(COVARIANCE, ONES))
    bounds = np.array([least_mu(root @ rng.standard_normal((3, 200)), ONES, 0.9) for _ in range(1000)])
    assert 70 <= (bounds > true).sum() <= 130
    assert least_mu(root @ rng.standard_normal((3, 100_000)), ONES, 0.999999) > 0.98 * true
    one = rng.standard_normal((1, 50))
    exact = math.sqrt(stats.chi2.ppf(0.05, 50) / np.square(one).sum())
    assert least_mu(one, np.ones(1), 0.95) == pytest.approx(exact)


def test_noise_that_is_used_twice_hides_nothing_from_who_looks_at_the_difference() -> None:
    rng = np.random.default_rng(2)
    shared = rng.standard_normal((1, 2000)).repeat(2, axis=0).astype(np.float32).astype(np.float64)
    signs = easiest_signs(shared)
    assert signs[0] == -signs[1]
    assert least_mu(shared, signs, 0.999) == math.inf
    assert least_mu(shared, np.ones(2), 0.999) < 1.1, "who gives the same twice gains nothing by it"
    assert least_mu(np.zeros((1, 10)), np.ones(1), 0.999) == math.inf
    partly = shared + 0.05 * rng.standard_normal(shared.shape)
    assert least_mu(partly, easiest_signs(partly), 0.999) > 10.0


def test_the_share_of_noise_that_is_caught_is_caught_as_often_as_stated() -> None:
    rng = np.random.default_rng(3)
    share = noise_caught(300, 2, 0.99, 0.9)
    found = sum(
        least_mu(share * rng.standard_normal((2, 300)), np.ones(2), 0.99) > math.sqrt(2) for _ in range(600)
    )
    assert 0.86 <= found / 600 <= 0.94
    assert 0.92 < noise_caught(8192, 4, 1 - 1e-6, 1 - 1e-6) < 0.94
    assert 0.70 < noise_caught(200, 4, 1 - 1e-3, 0.99) < 0.85


def test_unsound_noise_is_refused() -> None:
    with pytest.raises(PrivacyError, match="2 coordinates of 3 releases"):
        least_mu(np.ones((3, 2)), ONES, 0.9)
    with pytest.raises(PrivacyError, match="finite"):
        least_mu(np.array([[1.0, math.nan]]), np.ones(1), 0.9)


def test_rates_are_bounded_by_clopper_and_pearson() -> None:
    assert least_rate(np.array([10]), 10, 0.9) == pytest.approx(0.05 ** (1 / 10))
    # One of fifty that always takes part is seen among the others, and honest draws are not.
    assert least_rate(np.array([20, *([6] * 49)]), 20, 0.99) == pytest.approx((0.005 / 50) ** (1 / 20))
    rng = np.random.default_rng(4)
    passed = sum(least_rate(rng.binomial(20, 0.3, 50), 20, 0.9) > 0.3 for _ in range(300))
    assert passed <= 45
    more = rate_caught(0.3, 20, 50, 0.99, 0.9)
    assert 0.3 < more < 0.4
    found = sum(least_rate(rng.binomial(20, more, 50), 20, 0.99) > 0.3 for _ in range(300))
    assert 250 <= found <= 290


@pytest.mark.parametrize(("steps", "rate"), [(2, 0.2), (10, 0.05), (40, 0.3)])
def test_a_batch_drawn_once_is_told_from_one_for_each_step(steps: int, rate: float) -> None:
    chance, runs, units, confidence = np.random.default_rng(5), 400, 240, 0.95
    least = pairs_refuted(units, steps, rate, confidence)

    def refuted(counts: NDArray[np.int64]) -> float:
        return float(np.mean([pairs_of(each) >= least for each in counts]))

    assert refuted(chance.binomial(steps, rate, (runs, units))) < 1.0 - confidence
    assert refuted(chance.binomial(steps, rate / 2, (runs, units))) == 0.0
    caught = shared_rate_caught(units, steps, rate, confidence, 0.99)
    assert caught < rate
    assert refuted(steps * chance.binomial(1, caught, (runs, units))) > 0.97


def test_the_bound_on_pairs_lies_above_the_exact_chance() -> None:
    """Of two steps there is one pair, so that pairs are binomial themselves."""
    for pairs in (8, 20, 60):
        exact = stats.binom.logsf(pairs - 1, 100, 0.2**2)
        assert exact <= log_chance_of_pairs(pairs, 100, 2, 0.2) < exact + 3.0
    assert log_chance_of_pairs(100, 100, 2, 0.2) == pytest.approx(200 * np.log(0.2))
    assert log_chance_of_pairs(1, 100, 2, 0.2) == 0.0


def test_the_largest_mean_is_found_among_others() -> None:
    rng, counts = np.random.default_rng(5), np.full(40, 9.0)
    means = np.ones(40)
    means[7] = 1.5
    sums = 9.0 * means + 0.3 * rng.standard_normal(40)
    assert 1.3 < least_mean(sums, counts, 0.1 * np.sqrt(counts), 4000, 0.999) < 1.55
    honest = 9.0 + 0.3 * rng.standard_normal((400, 40))
    assert sum(least_mean(row, counts, 0.1 * np.sqrt(counts), 4000, 0.9) > 1.0 for row in honest) <= 55
    assert least_mean(
        np.array([0.0, 2.0]), np.array([0.0, 2.0]), np.full(2, 1e-6), 100, 0.9
    ) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(PrivacyError, match="no draw"):
        least_mean(np.zeros(2), np.zeros(2), np.zeros(2), 10, 0.9)


def test_scores_that_never_err_give_the_exact_binomial_bound() -> None:
    rates = threshold_rates(np.ones(100), np.zeros(200), 0.95)
    assert rates.true_positives == pytest.approx(0.025 ** (1 / 50))
    assert rates.false_positives == pytest.approx(1.0 - 0.025 ** (1 / 100))
    assert rates.epsilon(1e-5) == pytest.approx(
        math.log((rates.true_positives - 1e-5) / rates.false_positives)
    )
    assert Rates(0.0, 1.0).mu == Rates(0.0, 1.0).epsilon(0.1) == 0.0
    with pytest.raises(PrivacyError, match="four of each"):
        threshold_rates(np.ones(3), np.zeros(200), 0.95)


def test_scores_bound_mu_from_below_without_assuming_a_gaussian() -> None:
    rng = np.random.default_rng(6)
    found = [
        threshold_rates(rng.normal(1.0, 1.0, 400), rng.normal(0.0, 1.0, 400), 0.9).mu for _ in range(200)
    ]
    assert sum(mu > 1.0 for mu in found) <= 30
    assert np.median(found) > 0.4
    many = threshold_rates(rng.normal(1.0, 1.0, 20_000), rng.normal(0.0, 1.0, 20_000), 0.999, 1e-5)
    assert 0.7 < many.mu < 1.0
    assert 0.8 < many.epsilon(1e-5) < 4.38, "the exact epsilon of mu = 1 at this delta"


def test_noise_of_another_kind_is_named() -> None:
    rng = np.random.default_rng(7)
    honest = rng.standard_normal((3, 8192))
    assert odd_noise(honest, 0.999) == ""
    uniform = np.vstack([honest[:1], rng.uniform(-1.0, 1.0, (1, 8192))])
    assert odd_noise(uniform, 0.999) == "the noise of release 2 is not Gaussian"
    holes = honest[:1] * (rng.random(8192) < 0.8)
    assert "not Gaussian" in odd_noise(holes, 0.999)
    block = rng.standard_normal((1, 2048))
    assert "repeats itself after 2048" in odd_noise(np.hstack([block, block, block, block]), 0.999)
    assert odd_noise(np.zeros((1, 4096)), 0.999) == "release 1 has no noise"


def test_noise_that_adds_up_over_a_units_rounds_accuses_nobody() -> None:
    """Momentum makes banded noise change its sign each round: in every second round it is nearly the same."""
    rng, rounds, alarms = np.random.default_rng(6), 60, 0
    column = 0.95 ** np.arange(rounds) * (-1.0) ** np.arange(rounds)
    mixing = np.array([[column[t - s] if s <= t else 0.0 for s in range(rounds)] for t in range(rounds)])
    turns = np.zeros((rounds, 4))
    turns[::2, :2] = turns[1::2, 2:] = 1.0
    for _ in range(200):
        noise = 0.005 * mixing @ rng.standard_normal((rounds, 204))
        part = turns * (rng.random((rounds, 4)) < 0.7)
        alarms += change_by_one(CanaryTraces(part + noise[:, :4], noise[:, 4:]), 0.99).refuted
    assert alarms <= 6
