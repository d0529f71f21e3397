"""Noise in shares: exact samplers, bounded integers, a sum that decodes, never less noise than claimed."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from roundtable.core.config import JobConfig
from roundtable.core.errors import InvalidUpdate, PrivacyError
from roundtable.core.seeds import torch_generator
from roundtable.privacy import (
    DistributedDP,
    SecureNoise,
    SeededNoise,
    compose,
    decode,
    discrete_gaussian,
    distributed_noise,
    encode,
    gaussian_charge,
    skellam,
)
from roundtable.privacy.mechanisms import hadamard
from roundtable.privacy.mechanisms.distributed import _round
from roundtable.privacy.mechanisms.hadamard import transform
from roundtable.privacy.mechanisms.rotation import Rotation, rotate, unrotate

SEED = b"round 1"


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(7, 2), Fraction(900)])
def test_discrete_noise_has_its_distribution(variance: Fraction) -> None:
    count = 300_000
    k = np.arange(-400, 401)
    gaussian = np.exp(-(k**2) / (2 * float(variance)))
    expected = {
        "gaussian": gaussian / gaussian.sum(),
        "skellam": stats.skellam.pmf(k, float(variance) / 2, float(variance) / 2),
    }
    for name, sampler in (("gaussian", discrete_gaussian(variance)), ("skellam", skellam(variance))):
        draws = sampler.draw(SecureNoise(), count)
        assert np.issubdtype(draws.dtype, np.integer)
        observed = np.bincount(draws + 400, minlength=801)
        usual = expected[name] * count > 10
        chi2 = float(
            ((observed - expected[name] * count)[usual] ** 2 / (expected[name] * count)[usual]).sum()
        )
        assert stats.chi2.sf(chi2, int(usual.sum()) - 1) > 1e-7
        assert observed[~usual].sum() <= expected[name][~usual].sum() * count * 2 + 30


@pytest.mark.parametrize("make", [discrete_gaussian, skellam])
def test_large_discrete_noise_has_its_variance_and_tails(make: object) -> None:
    draws = make(Fraction(6000**2)).draw(SecureNoise(), 400_000) / 6000.0  # type: ignore[operator]
    assert draws.var() == pytest.approx(1.0, rel=0.015)
    assert abs(draws.mean()) < 0.01
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    assert (np.abs(draws) > 4).sum() == pytest.approx(400_000 * 2 * stats.norm.sf(4), abs=30)


def test_the_cumulative_table_is_right_to_its_last_digits() -> None:
    """Against probabilities in exact rational arithmetic, for a Skellam of mean 1/2 each."""
    terms = 60
    poisson = [Fraction(1, 2) ** k / math.factorial(k) for k in range(terms)]
    weight = sum(poisson) ** 2
    below = sum(poisson[a] * poisson[b] for a in range(terms) for b in range(terms) if a - b <= -1) / weight
    table = skellam(Fraction(1))
    offset = int(table._offset)
    found = (int(table._high[offset - 1]) << 64) + int(table._low[offset - 1])
    assert abs(Fraction(found, 1 << 128) - below) < Fraction(1, 1 << 100)


@pytest.mark.parametrize("variance", [Fraction(0), Fraction(1 << 40)])
def test_noise_out_of_range_is_refused(variance: Fraction) -> None:
    with pytest.raises(PrivacyError, match="out of range"):
        discrete_gaussian(variance)


@given(length=st.integers(1, 700), seed=st.binary(max_size=20))
@settings(max_examples=40, deadline=None)
def test_the_rotation_keeps_lengths_and_comes_back(length: int, seed: bytes) -> None:
    vector = torch.randn(length, generator=torch_generator(length))
    rotated = rotate(vector, seed)
    assert float(rotated.norm()) == pytest.approx(float(vector.norm()), rel=1e-5)
    torch.testing.assert_close(unrotate(rotated.clone(), seed, length), vector, atol=1e-5, rtol=1e-5)


def test_the_transform_is_hadamards() -> None:
    columns = torch.stack([transform(row.clone()) for row in torch.eye(64)])
    expected = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)]) / 8
    torch.testing.assert_close(columns, expected)


@given(length=st.integers(1, 700), seed=st.binary(max_size=20))
@settings(max_examples=40, deadline=None)
def test_the_rotation_without_padding_keeps_lengths_and_comes_back(length: int, seed: bytes) -> None:
    vector = torch.randn(length, generator=torch_generator(length))
    turned, rotation = vector.clone(), Rotation(seed, length)
    rotation.forward(turned)
    assert float(turned.norm()) == pytest.approx(float(vector.norm()), rel=1e-5)
    rotation.back(turned)
    torch.testing.assert_close(turned, vector, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", [0, 3000, 4999])
def test_whatever_the_vector_no_rotated_entry_is_beyond_the_bound(where: int) -> None:
    """One entry, a dense block, and all in one half: each spread to within five deviations, √2 at worst."""
    for width in (1, 40, 1900):
        vector = torch.zeros(5000)
        vector[min(where, 5000 - width) : where + width] = 1.0
        vector /= vector.norm()
        Rotation(SEED, 5000).forward(vector)
        assert float(vector.abs().max()) < 5.0 * math.sqrt(2.0 / 5000)


@pytest.mark.parametrize("length", [1, 2, 64, 256, 1 << 13, 1 << 18])
def test_the_kernel_gives_the_bits_of_torch(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.randn(length, generator=torch_generator(length))
    compiled = transform(vector.clone())
    monkeypatch.setattr(hadamard, "_library", lambda: None)
    assert torch.equal(compiled, transform(vector.clone()))


def test_the_rotation_spreads_a_single_entry() -> None:
    vector = torch.zeros(4096)
    vector[17] = 1.0
    assert float(rotate(vector, SEED).abs().max()) == pytest.approx(1 / 64)
    assert not torch.equal(rotate(vector, SEED), rotate(vector, b"round 2"))


@given(length=st.integers(1, 300), scale=st.floats(0.01, 50.0), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_what_is_encoded_is_never_longer_than_the_noise_assumes(length: int, scale: float, seed: int) -> None:
    """Rounding lengthens a vector: the bound that counts is on the integers, not on the clipped floats."""
    params = DistributedDP(1.0, 1.0, length, cohort=10, survivors=5)
    update = torch.randn(length, generator=torch_generator(seed)) * scale
    clipped = update * min(1.0, 1.0 / float(update.norm()))
    integers = _round(rotate(clipped, SEED).div(params.granularity), params.norm_bound, SecureNoise())
    assert float(np.linalg.norm(integers.astype(np.float64))) <= params.norm_bound
    assert params.norm_bound * params.granularity >= 1.0


def test_rounding_is_unbiased_and_a_vector_that_cannot_be_rounded_is_shortened() -> None:
    values = torch.full((1000,), 0.3)
    mean = np.mean([_round(values, 1e9, SecureNoise()).mean() for _ in range(100)])
    assert mean == pytest.approx(0.3, abs=0.01)
    assert np.linalg.norm(_round(torch.full((4,), 1000.0), 500.0, SecureNoise())) <= 500.0


def noiseless_sum(params: DistributedDP, updates: list[torch.Tensor]) -> torch.Tensor:
    total = np.zeros(params.length, dtype=np.uint32)
    for update in updates:
        total += encode(update, params, SEED, SecureNoise())
    return decode(total & np.uint32((1 << params.bits) - 1), params, SEED, len(updates))


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
@pytest.mark.parametrize("bits", [16, 20, 32])
def test_the_sum_decodes_to_the_sum_of_the_clipped_updates(mechanism: str, bits: int) -> None:
    params = DistributedDP(1.0, 1e-3, 500, cohort=12, survivors=8, bits=bits, mechanism=mechanism)
    updates = [torch.randn(500, generator=torch_generator(i)) * 0.2 for i in range(12)]
    clipped = [u * min(1.0, 1.0 / float(u.norm())) for u in updates]
    found = noiseless_sum(params, updates)
    assert float((found - torch.stack(clipped).sum(0)).norm()) < 0.02 + 20 * params.granularity * math.sqrt(
        12
    )


def test_encodings_are_integers_below_the_modulus_even_where_all_agree() -> None:
    params = DistributedDP(1.0, 0.5, 200, cohort=10, survivors=10, bits=18)
    update = torch.zeros(200)
    update[0] = 100.0
    encoded = encode(update, params, SEED, SecureNoise())
    assert encoded.dtype == np.uint32
    assert encoded.shape == (256,)
    assert int(encoded.max()) < 1 << 18
    found = noiseless_sum(params, [update] * 10)
    assert float(found[0]) == pytest.approx(10.0, abs=5 * 0.5 * 1.3)


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
@pytest.mark.parametrize("answered", [7, 8, 10])
def test_with_dropouts_the_variance_never_falls_below_the_claim(mechanism: str, answered: int) -> None:
    """A share of σ² / cohort would leave too little noise when a silo is lost or its update refused."""
    params = DistributedDP(1.0, 2.0, 40_000, cohort=10, survivors=7, mechanism=mechanism)
    found = noiseless_sum(params, [torch.zeros(40_000)] * answered)
    claimed = params.noise_multiplier * params.norm_bound * params.granularity
    assert float(found.double().var()) == pytest.approx(claimed**2 * answered / 7, rel=0.06)


def test_below_the_fewest_survivors_nothing_is_decoded() -> None:
    params = DistributedDP(1.0, 1.0, 10, cohort=10, survivors=7)
    zeros = np.zeros(16, dtype=np.uint32)
    for answered in (6, 11):
        with pytest.raises(PrivacyError, match="silos are in the sum"):
            decode(zeros, params, SEED, answered)
    with pytest.raises(PrivacyError, match="entries"):
        decode(zeros[:8], params, SEED, 8)


def test_bits_from_20_cost_nothing_against_central_noise_and_too_few_are_refused() -> None:
    central = compose([gaussian_charge("client", {"sampling": "none"}, 5.0, steps=50)], 1e-5, "rdp")
    for mechanism in ("skellam", "discrete_gaussian"):
        for bits in (20, 24):
            params = DistributedDP(
                1.0, 5.0, 1 << 20, cohort=100, survivors=100, bits=bits, mechanism=mechanism
            )
            assert central * 0.999 <= compose([params.charge.repeated(50)], 1e-5) <= central * 1.005
            assert params.norm_bound * params.granularity <= 1.002
    with pytest.raises(PrivacyError, match="bits are too few"):
        DistributedDP(1.0, 5.0, 1 << 20, cohort=100, survivors=100, bits=12)


def test_the_noise_is_never_repeated_unless_in_simulation() -> None:
    params = DistributedDP(1.0, 1.0, 100, cohort=4, survivors=3)
    first, second = (encode(torch.zeros(100), params, SEED, SecureNoise()) for _ in range(2))
    assert not np.array_equal(first, second)
    first, second = (encode(torch.zeros(100), params, SEED, SeededNoise(1)) for _ in range(2))
    assert np.array_equal(first, second)


def test_bad_updates_and_parameters_are_refused() -> None:
    params = DistributedDP(1.0, 1.0, 4, cohort=4, survivors=3)
    with pytest.raises(InvalidUpdate):
        encode(torch.tensor([1.0, float("nan"), 0.0, 0.0]), params, SEED, SecureNoise())
    with pytest.raises(PrivacyError, match="5 entries"):
        encode(torch.zeros(5), params, SEED, SecureNoise())
    for bad in (
        {"survivors": 0},
        {"survivors": 5},
        {"bits": 33},
        {"clip_norm": 0.0},
        {"noise_multiplier": 0.0},
    ):
        with pytest.raises(PrivacyError):
            DistributedDP(
                **{"clip_norm": 1.0, "noise_multiplier": 1.0, "dimension": 4, "cohort": 4, "survivors": 3}
                | bad
            )  # type: ignore[arg-type]


def job_of(silos: int, **privacy: object) -> JobConfig:
    table = {"level": "distributed", "noise_multiplier": 1.5, "delta": 1e-5, "clip_norm": 2.0, **privacy}
    values = {"task": "t", "cohort": {"size": silos}, "privacy": table}
    return JobConfig.model_validate(values)


def test_a_job_leaves_room_for_its_dropouts_and_its_colluders() -> None:
    params = distributed_noise(job_of(10, dropout_tolerance=0.25), 100)
    assert (params.survivors, params.colluding, params.honest) == (7, 3, 4)
    assert (params.clip_norm, params.noise_multiplier) == (2.0, 1.5)
    wary = distributed_noise(job_of(10, dropout_tolerance=0.0, corruption=0.5), 100)
    assert (wary.survivors, wary.colluding, wary.honest) == (10, 5, 5)
    many = distributed_noise(job_of(100), 100)
    assert (many.survivors, many.colluding, many.honest) == (70, 20, 50)
    with pytest.raises(PrivacyError, match="nobody honest is sure to be left"):
        distributed_noise(job_of(10, dropout_tolerance=0.5, corruption=0.5), 100)


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
@pytest.mark.parametrize(("silos", "corruption"), [(4, None), (10, None), (10, 0.5), (20, 0.0)])
def test_colluders_who_know_their_own_noise_see_no_less_than_is_charged(
    mechanism: str, silos: int, corruption: float | None
) -> None:
    """The attack: as few survivors as may be, and the colluders take what they sent out of the sum."""
    job = job_of(silos, mechanism=mechanism, corruption=corruption, dropout_tolerance=0.2)
    params = distributed_noise(job, 40_000)
    sent = [encode(torch.zeros(40_000), params, SEED, SecureNoise()) for _ in range(params.survivors)]
    known = sent[: params.colluding]
    left = sum(sent[1:], sent[0].copy()) - sum(known[1:], known[0].copy() if known else np.uint32(0))
    seen = decode(left & np.uint32((1 << params.bits) - 1), params, SEED, params.survivors)
    claimed = params.charge.noise_multiplier * params.norm_bound * params.granularity
    assert float(seen.double().var()) >= claimed**2 * 0.95
    assert params.charge.shares == params.honest
    assert params.charge.grid_std >= params.noise_multiplier * params.norm_bound
