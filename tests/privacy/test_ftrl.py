"""Correlated noise: less error on prefix sums, the claimed sensitivity, and an account that adds up."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld

from roundtable.core.errors import PrivacyError
from roundtable.privacy import (
    Banded,
    Buffered,
    MatrixMechanism,
    NoiseSource,
    SecureNoise,
    SeededNoise,
    TreeFTRL,
    compose,
    eligible,
    gaussian_charge,
    prefix_error,
    solve_noise,
)
from roundtable.privacy.mechanisms.factorise import Factorisation, optimal_banded, optimal_buffered
from roundtable.privacy.mechanisms.gaussian import standard_normal
from roundtable.privacy.mechanisms.toeplitz import Workload, square_root


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


FACTORISATIONS = {
    "independent": Banded((1.0,)),
    "banded": Banded(tuple(square_root(3))),
    "more bands than rounds apart": Banded(tuple(square_root(9))),
    "BLT": Buffered((0.3, 0.25), (0.95, 0.6)),
}


def noises(plan: MatrixMechanism, dimension: int, source: NoiseSource) -> list[torch.Tensor]:
    """What each round publishes; every second draw is of an attempt that publishes nothing."""
    state, published = plan.init(dimension), []
    for _ in range(plan.rounds):
        state.draw(source)
        noise = state.draw(source)
        published.append(noise.double().clone())
        state = state.after(noise)
    with pytest.raises(PrivacyError, match=f"all {plan.rounds} rounds"):
        state.draw(source)
    return published


@pytest.mark.parametrize("kind", FACTORISATIONS)
def test_the_noise_of_all_rounds_becomes_independent_under_c(kind: str) -> None:
    """C w must be white noise of the claimed size: that is what the guarantee rests on."""
    rounds, dimension = 9, 20_000
    plan = MatrixMechanism(0.5, 2.0, rounds, 5, FACTORISATIONS[kind])
    published = torch.stack(noises(plan, dimension, SecureNoise())).numpy()
    c = matrix(plan.column, rounds)
    white = c @ published
    covariance = white @ white.T / dimension / plan.standard_deviation**2
    np.testing.assert_allclose(covariance, np.eye(rounds), atol=0.06)
    inverse = np.linalg.inv(c)
    drawn = published @ published.T / dimension / plan.standard_deviation**2
    np.testing.assert_allclose(drawn, inverse @ inverse.T, atol=0.1)
    assert plan.standard_deviation == pytest.approx(2.0 * 0.5 * plan.sensitivity(rounds))


def test_a_long_run_of_buffers_strays_from_its_matrix_by_rounding_only() -> None:
    """C w against the very noise beneath it: 300 roundings of the buffers to float32 do not add up."""
    rounds, dimension = 300, 64
    plan = MatrixMechanism(1.0, 1.0, rounds, 50, Buffered((0.3, 0.2), (0.998, 0.7)))
    published = torch.stack(noises(plan, dimension, SeededNoise(1))).numpy()
    white = matrix(plan.column, rounds) @ published
    source, beneath = SeededNoise(1), []
    for _ in range(rounds):
        standard_normal(source, dimension)
        beneath.append(standard_normal(source, dimension).numpy() * plan.standard_deviation)
    assert np.abs(white - np.stack(beneath)).max() < 2e-5 * plan.standard_deviation


@pytest.mark.parametrize(("kind", "kept"), [("banded", 2), ("BLT", 2), ("independent", 0)])
def test_the_memory_is_as_small_as_said(kind: str, kept: int) -> None:
    state = MatrixMechanism(1.0, 1.0, 100, 50, FACTORISATIONS[kind]).init(1000)
    assert state.history.shape == (kept, 1000)
    assert state.history.dtype == torch.float32


def test_an_attempt_that_published_nothing_draws_fresh_noise() -> None:
    """The same noise for two attempts would let their difference through in the clear."""
    state = MatrixMechanism(1.0, 1.0, 5, 5, FACTORISATIONS["banded"]).init(50)
    first, second = state.draw(SecureNoise()), state.draw(SecureNoise())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", FACTORISATIONS)
@pytest.mark.parametrize("separation", [1, 3, 5])
def test_the_charges_of_all_rounds_are_one_gaussian(kind: str, separation: int) -> None:
    plan = MatrixMechanism(1.0, 2.0, 12, separation, FACTORISATIONS[kind])
    epsilons = [compose([plan.charge(t) for t in range(1, n + 1)], 1e-5) for n in range(13)]
    assert epsilons == sorted(epsilons)
    for n in range(13):
        z = 2.0 * plan.sensitivity(12) / plan.sensitivity(n) if n else 0.0
        whole = compose([gaussian_charge("client", {"sampling": "none"}, z)], 1e-5) if n else 0.0
        assert epsilons[n] == pytest.approx(whole, rel=1e-6)
    with pytest.raises(PrivacyError, match="round 13"):
        plan.charge(13)


def cyclic(rounds: int, groups: int, bands: int, rate: float, z: float = 1.5) -> MatrixMechanism:
    return MatrixMechanism(1.0, z, rounds, groups, Banded(tuple(square_root(bands))), rate)


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_a_silos_chances_are_releases_of_their_own(groups: int) -> None:
    """What the theorem rests on: columns of one group's rounds share no row, and none is longer than ‖c‖."""
    for bands in range(1, groups + 1):
        plan = cyclic(11, groups, bands, 0.2)
        c = matrix(plan.column, 11)
        for first in range(groups):
            columns = c[:, first::groups]
            gram = columns.T @ columns
            np.testing.assert_array_equal(gram, np.diag(np.diag(gram)))
            assert np.diag(gram).max() <= plan.sensitivity(11) ** 2 * (1 + 1e-12)
    assert plan.standard_deviation == pytest.approx(1.5 * plan.sensitivity(11))


def test_the_amplified_charge_is_that_of_the_equivalent_dp_sgd() -> None:
    """dp-accounting's own composition of ⌈t / b⌉ Poisson-sampled Gaussians, wherever the run ends."""
    plan = cyclic(10, 4, 3, 0.2)
    for done in (1, 4, 5, 10):
        spent = compose([plan.charge(t) for t in range(1, done + 1)], 1e-5)
        accountant = pld.PLDAccountant()
        step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5))
        accountant.compose(step, math.ceil(done / 4))
        assert spent == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3, abs=1e-9)
    with pytest.raises(PrivacyError, match="round 11"):
        plan.charge(11)


def test_amplified_noise_is_less_with_few_bands_than_without_sampling_with_all() -> None:
    """1,000 rounds of 1 % of the silos, ε = 4 at δ = 1e-6: 16 groups against 100 rounds of rest."""
    charge = gaussian_charge("client", {"sampling": "poisson", "rate": 0.16}, 1.0, steps=63)
    z = solve_noise(charge, 4.0, 1e-6).noise_multiplier
    banded = optimal_banded(Workload.prefix_sums(1000), 16, 1000)
    assert prefix_error(MatrixMechanism(1.0, z, 1000, 16, banded, 0.16)) == pytest.approx(11.45, abs=0.02)


@pytest.mark.parametrize(
    ("factorisation", "rate", "message"),
    [
        (Banded(tuple(square_root(4))), 0.5, "4 bands is not known to be amplified by sampling 3 groups"),
        (Buffered((0.3,), (0.5,)), 0.5, "BLT, 1 buffer is not known to be amplified"),
        (Banded((1.0,)), 0.0, "sampling rate"),
        (Banded((1.0,)), float("nan"), "sampling rate"),
    ],
)
def test_what_is_not_proven_to_be_amplified_is_refused(
    factorisation: Factorisation, rate: float, message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        MatrixMechanism(1.0, 1.0, 9, 3, factorisation, rate)


def test_correlated_noise_beats_the_tree_and_amplified_sampling() -> None:
    """1,000 rounds, ten participations 100 apart, ε = 4 at δ = 1e-6: figures of independent prototypes."""
    z = solve_noise(gaussian_charge("client", {"sampling": "none"}, 1.0), 4.0, 1e-6).noise_multiplier

    def error(factorisation: Factorisation) -> float:
        return prefix_error(MatrixMechanism(1.0, z, 1000, 100, factorisation))

    assert error(Banded(tuple(square_root(100)))) == pytest.approx(14.5, abs=0.1)
    assert error(Banded(tuple(square_root(1000)))) == pytest.approx(18.8, abs=0.1)
    assert error(Banded((1.0,))) == pytest.approx(84, abs=1.0)
    assert 18.8 < TreeFTRL(1.0, z, 1000, 100).prefix_error() < 40
    amplified = solve_noise(
        gaussian_charge("client", {"sampling": "poisson", "rate": 0.01}, 1.0, steps=1000), 4.0, 1e-6, "rdp"
    )
    sums = Workload.prefix_sums(1000)
    banded, buffered = error(optimal_banded(sums, 100, 100)), error(optimal_buffered(sums, 3, 100))
    assert banded < 14.0 < buffered < 15.0 < amplified.noise_multiplier * math.sqrt(500.5)


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
        MatrixMechanism(**good | {"factorisation": Banded((1.0,))} | bad)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError):
        TreeFTRL(**good | bad)  # type: ignore[arg-type]


def test_a_round_publishes_the_bounded_mean_with_the_draw_and_nothing_else() -> None:
    plan = MatrixMechanism(1.0, 1.0, rounds=4, separation=2, factorisation=Banded((1.0, 0.5)))
    state, data = plan.init(2000), torch.zeros(3, 2000)
    data[0, 0] = 50.0
    noise = state.draw(SecureNoise())
    result = plan.central(expected_cohort=10.0).prepare(Rows(data), SecureNoise(), correlated=noise)
    clean = result.vector - noise / 10.0
    assert float(clean[0]) == pytest.approx(0.1, abs=1e-4)
    assert float(clean[1:].abs().max()) < 1e-5
    assert result.standard_deviation == pytest.approx(plan.standard_deviation / 10.0)
