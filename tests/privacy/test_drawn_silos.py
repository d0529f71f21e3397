"""ε of a record over the draw of silos: against integrals and a simulation, and why it is not amplified."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.privacy import Budget, Charge, compose, gaussian_charge, privacy_plan, render
from roundtable.privacy.accounting.drawn_silos import epsilon_over_draws
from roundtable.privacy.example_level import SiloAccount
from roundtable.privacy.protection import protection
from roundtable.privacy.statement import DRAWN_SILOS, statement

GRID = np.arange(-12.0, 13.0, 0.01)


def dp_sgd(noise: float, rate: float = 1.0, steps: int = 1) -> Charge:
    return Charge("gaussian", "example", "poisson", (("gradient", noise),), steps, rate=rate)


def gaussian_delta(epsilon: float, shift: float) -> float:
    """Balle & Wang 2018, Theorem 5."""
    far = math.exp(epsilon) * norm.cdf(-epsilon / shift - shift / 2)
    return float(norm.cdf(-epsilon / shift + shift / 2) - far)


@pytest.mark.parametrize(
    ("noise", "steps", "probability", "rounds", "delta"),
    [(5.0, 2, 0.1, 30, 1e-5), (8.0, 4, 0.3, 100, 1e-6), (3.0, 1, 0.02, 10, 1e-5), (3.0, 2, 0.999, 3, 1e-6)],
)
def test_whole_batches_are_a_binomial_mixture_of_gaussians(
    noise: float, steps: int, probability: float, rounds: int, delta: float
) -> None:
    def excess(epsilon: float) -> float:
        return sum(
            float(binom.pmf(n, rounds, probability)) * gaussian_delta(epsilon, math.sqrt(n * steps) / noise)
            for n in range(1, rounds + 1)
        ) - delta  # fmt: skip

    exact = float(brentq(excess, 1e-9, 100.0))
    found = epsilon_over_draws(dp_sgd(noise, steps=steps), probability, rounds, delta)
    assert exact <= found <= 1.02 * exact


def densities(noise: float, rate: float, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of `steps` Poisson batches with the record and without it, at all points of a grid."""
    without = norm.pdf(GRID, scale=noise)
    with_it = (1 - rate) * without + rate * norm.pdf(GRID, loc=1.0, scale=noise)
    both = [(with_it, without)] * steps
    whole = [np.ones(1), np.ones(1)]
    for pair in both:
        whole = [np.outer(old, new).ravel() * 0.01 for old, new in zip(whole, pair, strict=True)]
    return whole[0], whole[1]


def test_batches_inside_and_silos_outside_agree_with_an_integral() -> None:
    """Two rounds of one step each, the draw told: the loss is that of none, one or two Poisson samples."""
    noise, rate, probability, delta = 0.9, 0.4, 0.3, 1e-3

    def excess(epsilon: float) -> float:
        found = []
        for order in (1, -1):
            total = 0.0
            for steps, chance in ((1, 2 * probability * (1 - probability)), (2, probability**2)):
                p, q = densities(noise, rate, steps)[::order]
                total += chance * float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
            found.append(total)
        return max(found) - delta

    exact = float(brentq(excess, 1e-6, 20.0))
    found = epsilon_over_draws(dp_sgd(noise, rate), probability, 2, delta)
    assert 0.999 * exact <= found <= 1.02 * exact
    amplified = epsilon_over_draws(dp_sgd(noise, rate * probability), 1.0, 2, delta)
    assert amplified < 0.9 * exact


def test_a_record_in_a_silo_that_can_be_recognised_is_not_hidden_as_a_sample_of_silos_would_hide_it() -> None:
    """An audit of models that a silo's other records move far: it refutes the amplified claim, not ours."""
    noise, probability, rounds, delta, runs = 1.0, 0.2, 3, 1e-2, 200_000
    claimed = epsilon_over_draws(dp_sgd(noise), probability, rounds, delta)
    amplified = compose(
        [gaussian_charge("client", {"sampling": "poisson", "rate": probability}, noise, steps=rounds)], delta
    )
    chance = np.random.default_rng(7)
    silo, others = 50.0, 0.3
    drawn = chance.random((runs, rounds)) < probability
    models = chance.normal(scale=others, size=drawn.shape) * ~drawn
    models += drawn * (silo + 1.0 + chance.normal(scale=noise, size=drawn.shape))

    def likelihood(record: float) -> NDArray[np.float64]:
        """Of what everybody sees, by one who does not know who was drawn."""
        trained = norm.pdf(models, loc=silo + record, scale=noise)
        return (probability * trained + (1 - probability) * norm.pdf(models, scale=others)).prod(axis=1)

    loss = np.log(likelihood(1.0) / likelihood(0.0))

    def seen(epsilon: float) -> tuple[float, float]:
        """δ at ε, between limits that hold with 99.9 %."""
        each = np.maximum(1.0 - np.exp(epsilon - loss), 0.0)
        error = 3.3 * float(each.std()) / math.sqrt(runs)
        return float(each.mean()) - error, float(each.mean()) + error

    assert seen(amplified)[0] > 1.5 * delta
    assert seen(claimed)[1] < 1.1 * delta
    assert amplified < 0.8 * claimed


def test_the_figure_lies_between_the_accounts_of_silos_that_are_drawn_seldom_and_always() -> None:
    """It is the mean of δ over what accounts of silos come to; each is charged for its own rounds alone."""
    once, rounds, probability, delta = dp_sgd(2.0, 0.1, 5), 6, 0.5, 1e-4
    account = SiloAccount(Budget("ward", 50.0, delta))
    found = epsilon_over_draws(once, probability, rounds, delta)
    spent = []
    for trained in range(1, rounds + 1):
        account = account.charged("job", trained, 1, once)
        spent.append(account.spent().epsilon)
    assert spent[2] < found < spent[-1] == pytest.approx(compose([once.repeated_by(rounds)], delta))
    assert epsilon_over_draws(once, 1.0, rounds, delta) == spent[-1]
    smaller = [epsilon_over_draws(once, rate, rounds, delta) for rate in (0.9, 0.5, 0.1, 0.01)]
    assert all(a > b > 0 for a, b in itertools.pairwise(smaller))
    assert epsilon_over_draws(once, delta / 10, rounds, delta) < 1e-3 * spent[0]


def test_nothing_else_is_accounted_so() -> None:
    with pytest.raises(PrivacyError, match="probability 0"):
        epsilon_over_draws(dp_sgd(1.0), 0.0, 3, 1e-5)
    with pytest.raises(PrivacyError, match="DP-SGD"):
        epsilon_over_draws(gaussian_charge("client", {"sampling": "none"}, 1.0), 0.5, 3, 1e-5)


def job(**cohort: object) -> JobConfig:
    privacy = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-5, "clip_norm": 1.0}
    privacy |= {"population": 2000, "batch_size": 50, "local_steps": 4}
    tables = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}, "cohort": cohort}
    return JobConfig.model_validate({"task": "t", "rounds": 20, "privacy": privacy, **tables})


def test_the_plan_shows_both_and_says_which_is_which() -> None:
    drawn = privacy_plan(job(strategy="poisson", probability=0.1), 100, 500)
    assert drawn.drawn is not None
    assert drawn.drawn.probability == pytest.approx(0.1 / (1 - 0.9**100))
    assert drawn.drawn.rounds_on_average == 20 * drawn.drawn.probability
    assert 0.0 < drawn.drawn.epsilon < drawn.epsilon == privacy_plan(job(), 100, 500).epsilon
    assert asdict(drawn)["drawn"]["epsilon"] == drawn.drawn.epsilon
    said = render(drawn)
    assert DRAWN_SILOS in said
    assert f"epsilon = {drawn.drawn.epsilon:.4f} at the same delta, against all who do not choose it" in said
    lone = privacy_plan(job(strategy="poisson", probability=0.1), 1, 500)
    assert lone.drawn is not None
    assert (lone.drawn.probability, lone.drawn.epsilon) == (1.0, lone.epsilon), (
        "drawn until somebody is there"
    )
    everybody = privacy_plan(job(), 100, 500)
    assert everybody.drawn is None
    assert DRAWN_SILOS not in render(everybody)
    for other in ({"size": 10}, {"strategy": "poisson", "probability": 0.1, "minimum": 5}):
        plan = privacy_plan(job(**other), 100, 500)
        assert plan.drawn is None
        assert DRAWN_SILOS in render(plan)


def test_the_statement_claims_no_amplification_by_the_draw_of_silos() -> None:
    privacy = job(strategy="poisson", probability=0.1).privacy
    account = SiloAccount(Budget("ward", 50.0, 1e-5)).charged("job", 1, 1, dp_sgd(2.0, 0.1))
    assert DRAWN_SILOS in statement(privacy, account.spent())  # type: ignore[arg-type]
    for line in protection(privacy):
        assert line.holds
        assert line.assumption.endswith("every round in which it trains, whoever knows that it was drawn")
