"""The noise is what is claimed: its size, its tails, its grid, and that nobody can repeat it."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from scipy import stats

from roundtable.core.errors import PrivacyError
from roundtable.privacy import SecureNoise, SeededNoise, add_gaussian, local_gaussian
from roundtable.privacy.mechanisms import noise_grid
from roundtable.privacy.noise import KeyStream, bernoulli_mask, standard_normal


def test_the_variance_is_the_claim_over_many_draws() -> None:
    noisy = add_gaussian(torch.zeros(200_000), 3.0, SecureNoise())
    values = noisy.vector.double()
    assert float(values.var()) == pytest.approx(9.0, rel=0.03)
    assert abs(float(values.mean())) < 0.05
    assert noisy.standard_deviation == 3.0
    assert noisy.guarantee


def test_the_noise_is_normal_in_the_middle_and_in_the_tails() -> None:
    draws = standard_normal(SecureNoise(), 400_000).numpy()
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    for bound in (3.0, 4.0):
        expected = 2 * stats.norm.sf(bound) * draws.size
        assert abs((np.abs(draws) > bound).sum() - expected) < 6 * math.sqrt(expected) + 1
    assert abs(np.corrcoef(draws[:200_000], draws[200_000:])[0, 1]) < 0.015


@pytest.mark.parametrize("count", [0, 1, 2, 7, (1 << 16) + 3])
def test_any_number_of_draws(count: int) -> None:
    draws = standard_normal(SecureNoise(), count)
    assert draws.shape == (count,)
    assert bool(torch.isfinite(draws).all())


def test_two_runs_never_have_the_same_noise() -> None:
    """A seed reused in a second round, or after a restart, would subtract out."""
    vector = torch.zeros(64)
    first, second = (add_gaussian(vector, 1.0, SecureNoise()).vector for _ in range(2))
    assert not torch.equal(first, second)
    source = SecureNoise()
    assert not torch.equal(add_gaussian(vector, 1.0, source).vector, add_gaussian(vector, 1.0, source).vector)


def test_nobody_can_seed_the_noise_of_production() -> None:
    assert list(inspect.signature(SecureNoise).parameters) == []
    with pytest.raises(TypeError):
        SecureNoise(42)  # type: ignore[call-arg]


@pytest.mark.parametrize("key", [b"", b"\x01\x02\x03\x04", bytes(16), bytes(33)])
def test_short_keys_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        KeyStream(key)


def test_seeded_noise_repeats_and_says_that_it_guarantees_nothing() -> None:
    runs = [add_gaussian(torch.zeros(16), 1.0, SeededNoise(5, "round", 3)) for _ in range(2)]
    assert torch.equal(runs[0].vector, runs[1].vector)
    assert not runs[0].guarantee
    other = add_gaussian(torch.zeros(16), 1.0, SeededNoise(5, "round", 4))
    assert not torch.equal(runs[0].vector, other.vector)


def test_the_grid_hides_which_value_lies_beneath_the_noise() -> None:
    """With float32 noise an eighth of all outputs can come from only one of two neighbouring inputs.

    Rounded to the grid, the outputs for both inputs are multiples of it, whose residues are alike.
    """
    grid = noise_grid(1.0)
    assert grid == 2.0**-20
    for value in (0.0, 1.0, 1.0 / 3.0):
        out = add_gaussian(torch.full((50_000,), value, dtype=torch.float64), 1.0, SecureNoise()).vector
        steps = out / grid
        assert torch.equal(steps, steps.round())
        odd = float((steps.long() % 2 != 0).double().mean())
        assert odd == pytest.approx(0.5, abs=0.02)


def test_float32_results_keep_the_grid_near_zero() -> None:
    out = add_gaussian(torch.zeros(10_000), 1.0, SecureNoise()).vector.double() / 2.0**-20
    assert torch.equal(out, out.round())


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf")])
def test_no_noise_is_refused(std: float) -> None:
    with pytest.raises(PrivacyError, match="standard deviation"):
        add_gaussian(torch.zeros(3), std, SecureNoise())


def test_local_noise_is_scaled_to_the_clip_norm_and_the_update_is_clipped() -> None:
    source = SecureNoise()
    out = local_gaussian(torch.full((100_000,), 10.0), clip_norm=0.5, noise_multiplier=2.0, source=source)
    assert out.standard_deviation == 1.0
    assert float(out.vector.double().var()) == pytest.approx(1.0, rel=0.03)
    assert float(out.vector.double().mean()) == pytest.approx(0.5 / math.sqrt(100_000), abs=0.02)


def test_coins_have_their_probability() -> None:
    mask = bernoulli_mask(SecureNoise(), 100_000, 0.03)
    assert abs(int(mask.sum()) - 3000) < 6 * math.sqrt(3000)
    assert bernoulli_mask(SecureNoise(), 10, 1.0).all()
