"""The noise is what is claimed: its size, its tails, its grid, and that nobody can repeat it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats

from roundtable.core.errors import PrivacyError
from roundtable.privacy import SecureNoise, SeededNoise, add_gaussian, local_gaussian
from roundtable.privacy.mechanisms import gaussian
from roundtable.privacy.mechanisms.gaussian import BLOCK, block_of_normals, standard_normal
from roundtable.privacy.mechanisms.gaussian_mechanism import noise_grid, noise_onto
from roundtable.privacy.mechanisms.noise import KeyStream, bernoulli_mask


def test_the_variance_is_the_claim_over_many_draws() -> None:
    noisy = add_gaussian(torch.zeros(200_000), 3.0, SecureNoise())
    values = noisy.vector.double()
    assert float(values.var()) == pytest.approx(9.0, rel=0.03)
    assert abs(float(values.mean())) < 0.05
    assert noisy.standard_deviation == 3.0
    assert noisy.guarantee


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels, and what stands in for them."""
    gaussian._library.cache_clear()
    if request.param == "plain":
        monkeypatch.setenv("ROUNDTABLE_KERNELS", "off")
    elif gaussian._library() is None:
        pytest.skip("no C++ compiler")
    yield request.param
    gaussian._library.cache_clear()


class Words:
    """These words, in order."""

    guarantee = False

    def __init__(self, values: NDArray[np.uint64]) -> None:
        self._values = values

    def words(self, count: int) -> NDArray[np.uint64]:
        given, self._values = self._values[:count].copy(), self._values[count:]
        return given


@pytest.mark.usefixtures("way")
def test_the_noise_is_normal_in_the_middle_and_in_the_tails() -> None:
    draws = standard_normal(SecureNoise(), 400_000).numpy()
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    for bound in (3.0, 4.0):
        expected = 2 * stats.norm.sf(bound) * draws.size
        assert abs((np.abs(draws) > bound).sum() - expected) < 6 * math.sqrt(expected) + 1
    assert stats.kstest(draws[draws > 3.5], "truncnorm", args=(3.5, math.inf)).pvalue > 1e-6
    assert stats.kstest(stats.norm.cdf(draws) * 1024 % 1, "uniform").pvalue > 1e-6, "the low bits too"


@pytest.mark.usefixtures("way")
def test_draws_tell_nothing_of_one_another() -> None:
    """Neither within a pair, nor of neighbours, nor of another block; in value and in size."""
    draws = standard_normal(SecureNoise(), 20 * BLOCK).numpy()
    for lag in (1, 2, 8, 16, 512, BLOCK):
        for first, second in ((draws, draws), (draws**2, draws**2), (draws, draws**2)):
            assert abs(np.corrcoef(first[:-lag], second[lag:])[0, 1]) < 6 / math.sqrt(draws.size - lag)
    pairs = draws.reshape(-1, 2)
    assert stats.kstest(np.arctan2(pairs[:, 1], pairs[:, 0]) / (2 * math.pi) + 0.5, "uniform").pvalue > 1e-6
    assert stats.kstest((pairs**2).sum(1) / 2, "expon").pvalue > 1e-6


@pytest.mark.usefixtures("way")
def test_draws_do_not_depend_on_the_blocks_in_which_they_are_asked_for() -> None:
    source = SeededNoise(3, "noise")
    parts = [block_of_normals(source, count) for count in (2, BLOCK, 510, 1000, 4)]
    whole = standard_normal(SeededNoise(3, "noise"), sum(map(len, parts)))
    assert torch.equal(torch.cat(parts), whole)


def test_the_kernels_give_what_numpy_gives(way: str) -> None:
    """Edges of the uniforms too: the shortest and the longest radius, angles around every quarter turn."""
    edges = [0, 1, 2047, 2048, (1 << 64) - 1, (1 << 63) - 1]
    edges += [(eighth << 61) + step for eighth in range(8) for step in (0, 1 << 11, (1 << 61) - (1 << 11))]
    random = SeededNoise(5).words(40_000)
    edged = np.stack(np.meshgrid(np.array(edges, np.uint64), random[:100]), axis=-1)
    words = np.concatenate([edged.ravel(), edged[..., ::-1].ravel(), random])
    uniform = (words[0::2] >> np.uint64(11)).astype(np.float64) / 2.0**53 + 2.0**-53
    turn = (words[1::2] >> np.uint64(11)).astype(np.float64) / 2.0**53
    expected = np.sqrt(-2 * np.log(uniform)) * np.exp(2j * np.pi * turn)
    draws = standard_normal(Words(words), words.size).numpy()
    np.testing.assert_allclose(draws, np.stack([expected.real, expected.imag], 1).ravel(), rtol=0, atol=2e-14)
    assert 8.57 < np.abs(draws).max() <= math.sqrt(2 * 53 * math.log(2))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_noise_are_added_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    values = torch.randn(2 * BLOCK + 7).to(dtype) * 100.0
    out = torch.empty_like(values)
    noise_onto(values, 3.0, SeededNoise(1), out, 16.0)
    normal = standard_normal(SeededNoise(1), values.numel())
    steps = ((values.double() + 3.0 * normal) / noise_grid(3.0)).round()
    # A sum that lies between two steps may be rounded to either.
    off = (out.double() * 16.0 / noise_grid(3.0) - steps).abs()
    assert float(off.max()) <= (1.0 if dtype == torch.float64 else 1.0 + 2.0**-24 * float(steps.abs().max()))
    assert float((out == (steps * (noise_grid(3.0) / 16.0)).to(dtype)).double().mean()) > 0.9999


@pytest.mark.usefixtures("way")
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


def test_words_are_the_key_stream_of_aes() -> None:
    """FIPS 197 in counter mode (NIST SP 800-38A, 6.5): each block of zeros becomes its encrypted counter."""
    key = bytes(range(32))
    counters = b"".join(count.to_bytes(16, "big") for count in range(3))
    blocks = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)
    stream = KeyStream(key)
    assert stream.words(2).tobytes() + stream.words(4).tobytes() == blocks


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


@pytest.mark.usefixtures("way")
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
