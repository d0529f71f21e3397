"""Ranks of different speed: their shares of a batch, and that a step is the same whatever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_cases import Case, fit_unevenly, shares_of_rounds
from cluster_models import Language
from cluster_plans import STEPS, case, plan
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ranks import run_ranks

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.stepping.rank_shares import cut_by_shares, shares_by_speed


def test_unequal_shares_make_the_steps_of_one_process(tmp_path: Path) -> None:
    # A step that moves weights: what is compared is relative to that.
    ragged = {"batch_size": 7, "steps": 5, "learning_rate": 0.5}
    cases = [
        case("ddp", plan("ddp", dp=2), ragged, sgd=True, tolerance=1e-12),
        case("zero1", plan("zero1", dp=2), ragged, sgd=True, tolerance=1e-12),
    ]
    for results in run_ranks(fit_unevenly, 2, cases, tmp_path):
        for result in results.values():
            assert max(result["weights"], result["loss"]) < result["tolerance"]


def test_shares_follow_the_speed_that_was_measured() -> None:
    """A rank that is three times as fast, then one that is as fast, then no difference."""
    one = Case("shares", plan("ddp", micro=2, dp=2), Language(), {**STEPS, "batch_size": 16, "steps": 4})
    for rank, found in enumerate(run_ranks(shares_of_rounds, 2, one, [[1.0, 3.0], [1.0, 2.0], [1.0, 1.0]])):
        shares, taken = [each for each, _ in found], [each for _, each in found]
        assert shares[0] == pytest.approx((3 / 4, 1 / 4))
        assert shares[1] == pytest.approx(((3 / 4 + 2 / 3) / 2, (1 / 4 + 1 / 3) / 2))
        assert shares[2] is None
        assert taken[0] == [8] * 4
        assert taken[1] == [(12, 4)[rank]] * 4


@given(st.integers(0, 400), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9))
def test_all_examples_are_shared_out(count: int, weights: list[float]) -> None:
    shares = [each / sum(weights) for each in weights]
    found = cut_by_shares(count, shares)
    assert sum(found) == count
    assert all(abs(size - count * share) <= 1 + 1e-6 for size, share in zip(found, shares, strict=True))


def test_a_rank_that_was_not_measured_changes_nothing_and_one_that_stands_goes_on_being_measured() -> None:
    assert shares_by_speed([1.0, 0.0], (0.6, 0.4)) == (0.6, 0.4)
    assert shares_by_speed([1.0, 0.0], None) is None
    slow = shares_by_speed([1000.0, 1.0], None)
    assert slow is not None
    assert slow[1] > 0.04


@pytest.mark.parametrize(
    "table",
    [{"strategy": {"data_parallel": "zero3"}}, {"strategy": {"local_steps": 2}}, {"elastic": "replica"}],
)
def test_who_has_to_run_as_many_micro_batches_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match='shares = "measured" and'):
        ClusterTable.model_validate({"shares": "measured", **table})
