"""Nothing longer than the clip norm gets past clipping, whatever it is made of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import InvalidUpdate, PrivacyError
from roundtable.core.seeds import torch_generator
from roundtable.privacy import AdaptiveClip, SeededNoise, clip, clip_per_layer, l2_norm
from roundtable.privacy.mechanisms.gaussian import standard_normal


@given(
    length=st.integers(1, 300),
    scale=st.floats(1e-12, 1e12),
    bound=st.floats(1e-6, 1e6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1 << 40),
)
@settings(deadline=None)
def test_the_norm_as_aggregated_never_passes_the_bound(
    length: int, scale: float, bound: float, dtype: torch.dtype, seed: int
) -> None:
    vector = (torch.randn(length, generator=torch_generator(seed), dtype=torch.float64) * scale).to(dtype)
    result = clip(vector, bound)
    assert float(torch.linalg.vector_norm(result.vector.double())) <= bound
    if result.norm < 0.99 * bound:
        assert torch.equal(result.vector, vector)


def test_a_zero_vector_stays_zero() -> None:
    result = clip(torch.zeros(5), 1.0)
    assert torch.equal(result.vector, torch.zeros(5))
    assert not result.was_clipped


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    vector = torch.ones(8)
    vector[3] = bad
    with pytest.raises(InvalidUpdate) as caught:
        clip(vector, 1.0)
    assert caught.value.reason == "non_finite"
    with pytest.raises(InvalidUpdate):
        clip_per_layer(vector, [slice(0, 4), slice(4, 8)], 1.0)


def test_a_norm_beyond_float32_is_still_measured() -> None:
    vector = torch.full((4,), 3e38)
    assert l2_norm(vector) == pytest.approx(6e38, rel=1e-6)
    assert l2_norm(clip(vector, 2.0).vector) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(bound: float) -> None:
    with pytest.raises(PrivacyError):
        clip(torch.ones(3), bound)


def test_by_layer_each_layer_gets_its_share_and_the_whole_is_bounded() -> None:
    vector = torch.tensor([30.0, 40.0, 0.1, 0.0, 0.0, 5.0])
    result = clip_per_layer(vector, [slice(0, 2), slice(2, 5), slice(5, 6)], 3.0)
    share = 3.0 / math.sqrt(3)
    assert l2_norm(result.vector[0:2]) == pytest.approx(share, rel=1e-6)
    assert torch.equal(result.vector[2:5], vector[2:5])
    assert l2_norm(result.vector) <= 3.0
    assert result.was_clipped


@pytest.mark.parametrize(
    "slices", [[], [slice(0, 3)], [slice(0, 3), slice(2, 6)], [slice(0, 2), slice(3, 6)]]
)
def test_layers_that_leave_entries_unbounded_are_refused(slices: list[slice]) -> None:
    with pytest.raises(PrivacyError, match="exactly once"):
        clip_per_layer(torch.ones(6), slices, 1.0)


@pytest.mark.parametrize("start", [0.1, 10.0])
def test_the_adaptive_bound_finds_its_quantile_from_either_side(start: float) -> None:
    """With the sign of the update reversed it runs away from it instead."""
    norms = standard_normal(SeededNoise(7), 200).abs().add(0.5)
    target = float(torch.quantile(norms, 0.6))
    source = SeededNoise(3, "bits")
    state = AdaptiveClip.init(start * target, expected_cohort=200, quantile=0.6)
    for _ in range(120):
        within = float((norms <= state.clip_norm).double().sub(0.5).sum())
        state = state.apply(within, float(standard_normal(source, 1)[0]))
    assert abs(float((norms <= state.clip_norm).double().mean()) - 0.6) < 0.12


def test_the_adaptive_bound_divides_by_the_expected_cohort_and_adds_its_noise() -> None:
    state = AdaptiveClip(1.0, quantile=0.5, learning_rate=1.0, bit_noise=4.0, expected_cohort=10.0)
    assert state.apply(within=2.0, noise=0.0).clip_norm == pytest.approx(math.exp(-0.2))
    assert state.apply(within=2.0, noise=0.5).clip_norm == pytest.approx(math.exp(-0.4))
    assert state.bit_noise_multiplier == 8.0
