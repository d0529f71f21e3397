"""What one silo can change in a round is what the noise was made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.core.seeds import torch_generator
from roundtable.privacy import AdaptiveClip, CentralDP, SecureNoise, SeededNoise, accountant_for, clip


@dataclass
class Rows:
    data: Tensor
    largest: int = 0

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    def block(self, start: int, stop: int) -> Tensor:
        self.largest = max(self.largest, self.rows * (stop - start))
        return self.data[:, start:stop]


def updates(rows: int, columns: int, scale: float, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch_generator(seed)) * scale


def mean(central: CentralDP, data: Tensor, weights: list[float] | None = None) -> Tensor:
    """The result with its noise taken out: seeded noise of the same stream for the same length."""
    noisy = central.prepare(Rows(data), SeededNoise(1), weights).vector.double()
    return noisy - central.prepare(Rows(torch.zeros(0, data.shape[1])), SeededNoise(1)).vector.double()


@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 60),
    scale=st.floats(1e-3, 1e3),
    weights=st.lists(st.floats(0, 1e6), min_size=8, max_size=8),
    layered=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_a_silo_moves_the_result_by_no_more_than_its_share(
    rows: int, columns: int, scale: float, weights: list[float], layered: bool, seed: int
) -> None:
    """Its opposite moves it by twice that; nothing depends on who else answers, or on claimed counts."""
    slices = (slice(0, columns // 2), slice(columns // 2, columns)) if layered and columns > 1 else ()
    central = CentralDP(clip_norm=0.7, noise_multiplier=1.0, expected_cohort=5.0, slices=slices)
    data = updates(rows, columns, scale, seed)
    share = 0.7 / 5.0
    opposite = data.clone()
    opposite[0] *= -1
    whole = mean(central, data, weights[:rows])
    without = mean(central, data[1:], weights[1:rows])
    assert float((whole - without).norm()) <= share * (1 + 1e-4) + 1e-5
    assert float((whole - mean(central, opposite, weights[:rows])).norm()) <= 2 * share * (1 + 1e-4) + 1e-5


def test_a_weight_by_example_counts_does_not_break_the_bound() -> None:
    """One silo with 9,000 of 10,000 examples would move a mean weighted by counts nine times too far."""
    central = CentralDP(1.0, 1.0, expected_cohort=10.0)
    data = updates(10, 50, 10.0, 2)
    counts = [9000.0] + [111.0] * 9
    moved = (mean(central, data, counts) - mean(central, data[1:], counts[1:])).norm()
    assert float(moved) == pytest.approx(0.1, rel=1e-3)


def test_the_denominator_does_not_follow_the_dropouts() -> None:
    """With 6 of 10 answering, dividing by 6 would raise the sensitivity by 10/6."""
    central = CentralDP(1.0, 1.0, expected_cohort=10.0)
    data = updates(6, 50, 10.0, 2)
    assert float((mean(central, data) - mean(central, data[1:])).norm()) == pytest.approx(0.1, rel=1e-3)


def test_each_row_is_clipped_before_the_mean_and_not_the_mean_afterwards() -> None:
    central = CentralDP(1.0, 1.0, expected_cohort=2.0)
    data = torch.zeros(2, 4)
    data[0, 0], data[1, 1] = 1000.0, 0.5
    result = mean(central, data)
    torch.testing.assert_close(result, torch.tensor([0.5, 0.25, 0.0, 0.0]).double(), atol=1e-5, rtol=1e-5)


def test_the_noise_of_the_mean_is_what_is_claimed() -> None:
    central = CentralDP(clip_norm=0.5, noise_multiplier=3.0, expected_cohort=20.0)
    result = central.prepare(Rows(torch.zeros(3, 200_000)), SecureNoise())
    assert result.standard_deviation == pytest.approx(3.0 * 0.5 / 20.0)
    assert float(result.vector.double().std()) == pytest.approx(result.standard_deviation, rel=0.02)
    assert result.guarantee


def test_an_empty_round_is_pure_noise() -> None:
    result = CentralDP(1.0, 2.0, 10.0).prepare(Rows(torch.zeros(0, 50_000)), SecureNoise())
    assert float(result.vector.std()) == pytest.approx(0.2, rel=0.03)


def test_a_row_that_is_not_finite_is_left_out_and_named() -> None:
    central = CentralDP(1.0, 1.0, 4.0)
    data = updates(4, 30, 0.01, 3)
    bad = data.clone()
    bad[1, 7], bad[2, 0] = float("nan"), float("inf")
    result = central.prepare(Rows(bad), SeededNoise(1))
    assert result.rejected == (1, 2)
    torch.testing.assert_close(mean(central, bad), mean(central, data[[0, 3]]))


def test_it_streams() -> None:
    rows = Rows(torch.zeros(16, 1 << 18))
    CentralDP(1.0, 1.0, 16.0).prepare(rows, SecureNoise())
    assert rows.largest <= 1 << 20


def test_adaptive_clipping_charges_the_clip_bit_too_and_follows_the_norms() -> None:
    adaptive = AdaptiveClip.init(100.0, expected_cohort=100.0)
    central = CentralDP(1.0, 1.0, 100.0, adaptive=adaptive)
    assert central.bound == 100.0
    charge = central.charge(accountant_for("poisson", 1000, 100).fields())
    assert dict(charge.parts) == {"update": 1.0, "clip_bit": 10.0}
    result = central.prepare(Rows(updates(100, 40, 0.1, 4)), SecureNoise())
    assert result.next_clip is not None
    assert result.next_clip.clip_norm < 100.0
    assert result.standard_deviation == 1.0
    bits = central.prepare(Rows(updates(100, 40, 0.1, 4)), SecureNoise(), within=[False] * 100)
    assert bits.next_clip is not None
    assert bits.next_clip.clip_norm > 100.0


@pytest.mark.parametrize("start", [0.05, 20.0])
def test_the_bound_finds_its_quantile_where_silos_clip_before_they_send(start: float) -> None:
    """Clipped updates arrive with a norm of C: taken for short ones they would shrink C for ever."""
    central = CentralDP(1.0, 1.0, 200.0, adaptive=AdaptiveClip.init(start, 200.0))
    data = updates(200, 10, 1.0, 7)
    for _ in range(60):
        assert central.adaptive is not None
        sent = torch.stack([clip(row, central.bound).vector for row in data])
        result = central.prepare(Rows(sent), SeededNoise(1, _))
        central = replace(central, adaptive=result.next_clip)
    within = float((data.norm(dim=1) <= central.bound).double().mean())
    assert abs(within - 0.5) < 0.15


def test_only_what_carries_noise_may_be_published() -> None:
    """All that the result holds, by whether it depends on the rows: a new field must be judged here."""
    central = CentralDP(1.0, 1.0, 10.0, adaptive=AdaptiveClip.init(1.0, 10.0))
    noisy, public, coordinator_only = (
        {"vector", "next_clip"},
        {"standard_deviation", "guarantee"},
        {"rejected"},
    )
    result = central.prepare(Rows(updates(5, 10, 5.0, 5)), SecureNoise())
    assert set(vars(result)) == noisy | public | coordinator_only
    other = central.prepare(Rows(updates(9, 10, 0.1, 6)), SecureNoise())
    for name in public:
        assert getattr(result, name) == getattr(other, name)
    again = central.prepare(Rows(updates(5, 10, 5.0, 5)), SecureNoise())
    for name in noisy:
        assert not torch.equal(torch.as_tensor(_number(result, name)), torch.as_tensor(_number(again, name)))


def _number(result: object, name: str) -> Tensor:
    value = getattr(result, name)
    return value if isinstance(value, Tensor) else torch.tensor(value.clip_norm)


@pytest.mark.parametrize("bad", [{"clip_norm": 0.0}, {"noise_multiplier": 0.0}, {"expected_cohort": 0.0}])
def test_settings_without_a_guarantee_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PrivacyError):
        CentralDP(**{"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_cohort": 1.0} | bad)  # type: ignore[arg-type]


def test_wrong_numbers_of_weights_and_uncovered_layers_are_refused() -> None:
    with pytest.raises(PrivacyError, match="weights"):
        CentralDP(1.0, 1.0, 1.0).prepare(Rows(torch.zeros(2, 3)), SecureNoise(), [1.0])
    with pytest.raises(PrivacyError, match="do not cover"):
        CentralDP(1.0, 1.0, 1.0, slices=(slice(0, 2),)).prepare(Rows(torch.zeros(2, 3)), SecureNoise())
