"""Factorisations: the claimed sensitivity against every way to take part, and the least error there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from roundtable.core.errors import PrivacyError
from roundtable.privacy.mechanisms.factorise import (
    Banded,
    Buffered,
    Factorisation,
    best_factorisation,
    optimal_banded,
    optimal_buffered,
)
from roundtable.privacy.mechanisms.toeplitz import Workload, inverse, rms, square_root, squared_reach


def matrix(column: np.ndarray, rounds: int) -> np.ndarray:
    padded = np.concatenate([column, np.zeros(rounds)])
    return np.array([[padded[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])


def patterns(rounds: int, separation: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


def answers(workload: Workload) -> np.ndarray:
    """A: what each model is of the rounds' sums, step by step as a server computes it."""
    rounds = workload.rounds
    momentum, models = np.zeros((rounds, rounds)), np.zeros((rounds, rounds))
    for t in range(rounds):
        momentum[t] = workload.momentum * momentum[t - 1] if t else 0.0
        momentum[t, t] += 1.0
        models[t] = (models[t - 1] if t else 0.0) + workload.rates[t] * momentum[t]
    return models


COSINE = tuple(0.5 * (1 + np.cos(np.pi * np.arange(9) / 9)))
WORKLOADS = (Workload.prefix_sums(9), Workload((1.0,) * 9, 0.9), Workload(COSINE, 0.5))


def factorisations(rounds: int) -> list[Factorisation]:
    sums = Workload.prefix_sums(rounds)
    return [
        Banded((1.0,)),
        Banded(tuple(square_root(3))),
        optimal_banded(sums, rounds, 3),
        optimal_buffered(sums, 2, 2),
        Buffered((0.6, 0.4), (0.9, 0.0)),
    ]


@pytest.mark.parametrize("separation", [1, 2, 3, 9])
def test_the_sensitivity_is_the_worst_over_all_ways_to_take_part(separation: int) -> None:
    for factorisation in factorisations(8):
        column = factorisation.column(8)
        reach = squared_reach(column, 8, separation)
        for rounds in (1, 5, 8):
            c = matrix(column, rounds)
            worst = max(np.square(c[:, chosen].sum(1)).sum() for chosen in patterns(rounds, separation))
            assert reach[rounds - 1] == pytest.approx(worst), (factorisation, rounds)


@pytest.mark.parametrize("workload", WORKLOADS, ids=["prefix sums", "momentum", "schedule"])
def test_the_error_is_that_of_the_servers_own_steps(workload: Workload) -> None:
    a = answers(workload)
    for factorisation in factorisations(9):
        column = factorisation.column(9)
        noise = np.square(a @ np.linalg.inv(matrix(column, 9))).sum(1)
        assert workload.mean_square(column) == pytest.approx(noise.mean())
        assert [workload.square(column, n) for n in (1, 4, 9)] == pytest.approx(list(noise[[0, 3, 8]]))


@pytest.mark.parametrize("workload", WORKLOADS, ids=["prefix sums", "momentum", "schedule"])
def test_the_slope_is_that_of_the_error(workload: Workload) -> None:
    column = optimal_buffered(workload, 2, 4).column(9)
    value, slope = workload.with_slope(column)
    assert value == pytest.approx(workload.mean_square(column))
    for j in range(1, 9):
        nudge = 1e-6 * np.eye(9)[j]
        measured = (workload.mean_square(column + nudge) - workload.mean_square(column - nudge)) / 2e-6
        assert slope[j] == pytest.approx(measured, rel=1e-5)


def test_long_columns_are_inverted_as_short_ones_are() -> None:
    column = square_root(1000, 0.9)
    product = np.convolve(column, inverse(column, 1000))[:1000]
    np.testing.assert_allclose(product, np.eye(1000)[0], atol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_square_root_squared_is_the_workload(momentum: float) -> None:
    root = matrix(square_root(9, momentum), 9)
    np.testing.assert_allclose(root @ root, answers(Workload((1.0,) * 9, momentum)))


@pytest.mark.parametrize(
    ("rounds", "separation", "bands", "published"),
    [(1000, 100, 16, 19.8533), (1000, 100, 100, 11.5727), (2000, 400, 400, 7.8491)],
)
def test_banded_coefficients_are_as_good_as_those_that_others_find(
    rounds: int, separation: int, bands: int, published: float
) -> None:
    """Figures of jax_privacy 2.0's `optimize_banded_toeplitz`, by the authors of BandMF."""
    sums = Workload.prefix_sums(rounds)
    found = optimal_banded(sums, bands, separation)
    error = rms(found.column(rounds), sums, separation)
    assert error == pytest.approx(published, rel=1e-4)
    assert error < rms(square_root(bands), sums, separation)


@pytest.mark.parametrize(("rounds", "separation", "published"), [(1000, 100, 12.4023), (2000, 400, 8.5433)])
def test_few_buffers_come_near_to_all_bands(rounds: int, separation: int, published: float) -> None:
    """jax_privacy 2.0's BLTs have the least largest error; these the least mean, which is compared here."""
    sums = Workload.prefix_sums(rounds)
    error = rms(optimal_buffered(sums, 3, separation).column(rounds), sums, separation)
    least = rms(optimal_banded(sums, separation, separation).column(rounds), sums, separation)
    assert least < error < min(published, 1.06 * least)


@pytest.mark.parametrize("workload", WORKLOADS[1:], ids=["momentum", "schedule"])
def test_what_is_optimised_for_the_servers_steps_has_less_noise_on_its_models(workload: Workload) -> None:
    sums = Workload.prefix_sums(9)
    for optimal in (lambda w: optimal_banded(w, 4, 4), lambda w: optimal_buffered(w, 2, 4)):
        fitted, plain = optimal(workload).column(9), optimal(sums).column(9)
        assert rms(fitted, workload, 4) < rms(plain, workload, 4)
        assert rms(plain, sums, 4) < rms(fitted, sums, 4)


def test_without_a_choice_the_one_with_less_noise_is_taken() -> None:
    few = best_factorisation(Workload.prefix_sums(1000), 100)
    assert isinstance(few, Buffered)
    assert few.kept == 2
    short = best_factorisation(Workload.prefix_sums(100), 10)
    assert isinstance(short, Banded)
    assert short.kept == 9
    assert best_factorisation(Workload.prefix_sums(100), 1).kept == 0
    assert best_factorisation(Workload.prefix_sums(100), 10, bands=7).kept == 6
    assert best_factorisation(Workload.prefix_sums(100), 10, buffers=2).kept == 2
    assert best_factorisation(Workload.prefix_sums(1), 1).column(1).tolist() == [1.0]


@pytest.mark.parametrize("coefficients", [(), (0.5,), (1.0, -0.1), (1.0, 0.2, 0.3), (1.0, float("nan"))])
def test_coefficients_whose_sensitivity_is_not_known_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(PrivacyError, match=r"coefficients = \[.*all ways to take part is not known"):
        Banded(coefficients)


@pytest.mark.parametrize(
    ("weights", "decays", "message"),
    [
        ((0.7, 0.4), (0.9, 0.5), "add up to at most 1"),
        ((0.7, -0.1), (0.9, 0.5), "above 0"),
        ((float("nan"),), (0.9,), "above 0"),
        ((0.5,), (1.0,), "decays"),
        ((0.5,), (-0.5,), "decays"),
        ((0.5,), (float("nan"),), "decays"),
        ((0.5, 0.1), (0.5,), "each buffer has one of both"),
    ],
)
def test_buffers_whose_sensitivity_is_not_known_are_refused(
    weights: tuple[float, ...], decays: tuple[float, ...], message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        Buffered(weights, decays)
