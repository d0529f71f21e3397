"""Correlated noise: less error on prefix sums, the claimed sensitivity, and an account that adds up."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from roundtable.core.errors import PrivacyError
from roundtable.privacy import (
    BandedFTRL,
    SecureNoise,
    TreeFTRL,
    best_bands,
    compose,
    eligible,
    gaussian_charge,
    prefix_error,
    solve_noise,
)
from roundtable.privacy.mechanisms.ftrl import square_root_coefficients, toeplitz_sensitivity


@dataclass
class Rows:
    data: torch.Tensor

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.data[:, start:stop]


def matrix(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    return np.array(
        [
            [coefficients[i - j] if 0 <= i - j < len(coefficients) else 0.0 for j in range(rounds)]
            for i in range(rounds)
        ]
    )


def test_the_square_of_the_root_is_the_matrix_of_prefix_sums() -> None:
    root = matrix(square_root_coefficients(12), 12)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((12, 12))))


@pytest.mark.parametrize("bands", [1, 2, 3, 8])
@pytest.mark.parametrize("separation", [1, 2, 3, 9])
def test_the_sensitivity_is_the_worst_over_all_ways_to_take_part(bands: int, separation: int) -> None:
    rounds = 8
    c = square_root_coefficients(bands)
    columns = matrix(c, rounds)
    worst = 0.0
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                worst = max(worst, float(np.linalg.norm(columns[:, chosen].sum(1))))
    assert toeplitz_sensitivity(tuple(c), rounds, separation) == pytest.approx(worst)


@pytest.mark.parametrize("bands", [1, 3, 5])
def test_the_noise_of_all_rounds_becomes_independent_under_c(bands: int) -> None:
    """C w must be white noise of the claimed size: that is what the guarantee rests on."""
    rounds, dimension = 9, 20_000
    plan = BandedFTRL(clip_norm=0.5, noise_multiplier=2.0, rounds=rounds, separation=5, bands=bands)
    state, source, published = plan.init(dimension), SecureNoise(), []
    for _ in range(rounds):
        state.draw(source)
        noise = state.draw(source)
        published.append(noise.double().clone())
        state = state.after(noise)
    white = matrix(plan.coefficients, rounds) @ torch.stack(published).numpy()
    covariance = white @ white.T / dimension / plan.standard_deviation**2
    np.testing.assert_allclose(covariance, np.eye(rounds), atol=0.06)
    assert plan.standard_deviation == pytest.approx(2.0 * 0.5 * plan.sensitivity(rounds))
    with pytest.raises(PrivacyError, match="all 9 rounds"):
        state.draw(source)


def test_the_memory_is_bands_times_the_vector() -> None:
    state = BandedFTRL(1.0, 1.0, rounds=100, separation=50, bands=4).init(1000)
    assert state.history.shape == (3, 1000)
    assert state.history.dtype == torch.float32


def test_an_attempt_that_published_nothing_draws_fresh_noise() -> None:
    """The same noise for two attempts would let their difference through in the clear."""
    state = BandedFTRL(1.0, 1.0, rounds=5, separation=5, bands=3).init(50)
    first, second = state.draw(SecureNoise()), state.draw(SecureNoise())
    assert not torch.equal(first, second)


def test_the_charges_of_all_rounds_are_one_gaussian() -> None:
    for bands, separation in ((3, 5), (8, 3), (1, 4)):
        plan = BandedFTRL(1.0, 2.0, rounds=12, separation=separation, bands=bands)
        epsilons = [compose([plan.charge(t) for t in range(1, n + 1)], 1e-5) for n in range(13)]
        assert epsilons == sorted(epsilons)
        assert epsilons[0] == 0.0
        whole = compose([gaussian_charge("client", {"sampling": "none"}, 2.0)], 1e-5)
        assert epsilons[12] == pytest.approx(whole, rel=1e-6)
    with pytest.raises(PrivacyError, match="round 13"):
        plan.charge(13)


def test_banded_noise_beats_the_tree_the_full_root_and_amplified_sampling() -> None:
    """1,000 rounds, ten participations 100 apart, ε = 4 at δ = 1e-6: figures of independent prototypes."""
    z = solve_noise(gaussian_charge("client", {"sampling": "none"}, 1.0), 4.0, 1e-6).noise_multiplier
    banded = prefix_error(BandedFTRL(1.0, z, 1000, 100, 100))
    assert banded == pytest.approx(14.5, abs=0.1)
    assert prefix_error(BandedFTRL(1.0, z, 1000, 100, 1000)) == pytest.approx(18.8, abs=0.1)
    assert prefix_error(BandedFTRL(1.0, z, 1000, 100, 1)) == pytest.approx(84, abs=1.0)
    tree = TreeFTRL(1.0, z, 1000, 100).prefix_error()
    assert banded < 18.8 < tree < 40
    best = best_bands(1.0, z, 1000, 100)
    assert prefix_error(best) <= banded
    amplified = solve_noise(
        gaussian_charge("client", {"sampling": "poisson", "rate": 0.01}, 1.0, steps=1000), 4.0, 1e-6, "rdp"
    )
    assert banded < amplified.noise_multiplier * math.sqrt(500.5)


def test_the_tree_has_its_claimed_noise_on_every_prefix() -> None:
    plan = TreeFTRL(1.0, 3.0, rounds=11, separation=4)
    state, source = plan.init(30_000), SecureNoise()
    prefix = torch.zeros(30_000, dtype=torch.float64)
    for round_ in range(1, 12):
        noise, state = state.apply(source)
        prefix += noise
        nodes = bin(round_).count("1")
        assert float(prefix.var()) == pytest.approx(nodes * plan.standard_deviation**2, rel=0.06)
    with pytest.raises(PrivacyError, match="all 11 rounds"):
        state.apply(source)


def test_the_trees_sensitivity_bounds_every_way_to_take_part() -> None:
    rounds, separation = 8, 3
    nodes = [range(start, start + w) for w in (1, 2, 4, 8) for start in range(0, rounds, w)]
    plan = TreeFTRL(1.0, 1.0, rounds, separation)
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                squares = sum(len(set(node) & set(chosen)) ** 2 for node in nodes)
                assert math.sqrt(squares) <= plan.sensitivity + 1e-9


def test_nobody_takes_part_too_soon() -> None:
    last = {"north": 3, "south": 5}
    assert [eligible(last, silo, 7, 4) for silo in ("north", "south", "new")] == [True, False, True]


@pytest.mark.parametrize(
    "bad", [{"clip_norm": 0.0}, {"noise_multiplier": 0.0}, {"rounds": 0}, {"separation": 0}]
)
def test_plans_without_a_guarantee_are_refused(bad: dict[str, float]) -> None:
    good = {"clip_norm": 1.0, "noise_multiplier": 1.0, "rounds": 5, "separation": 2}
    with pytest.raises(PrivacyError):
        BandedFTRL(**good | {"bands": 2} | bad)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError):
        TreeFTRL(**good | bad)  # type: ignore[arg-type]


def test_a_round_publishes_the_bounded_mean_with_the_draw_and_nothing_else() -> None:
    plan = BandedFTRL(clip_norm=1.0, noise_multiplier=1.0, rounds=4, separation=2, bands=2)
    state, data = plan.init(2000), torch.zeros(3, 2000)
    data[0, 0] = 50.0
    noise = state.draw(SecureNoise())
    result = plan.central(expected_cohort=10.0).prepare(Rows(data), SecureNoise(), correlated=noise)
    clean = result.vector - noise / 10.0
    assert float(clean[0]) == pytest.approx(0.1, abs=1e-4)
    assert float(clean[1:].abs().max()) < 1e-5
    assert result.standard_deviation == pytest.approx(plan.standard_deviation / 10.0)
