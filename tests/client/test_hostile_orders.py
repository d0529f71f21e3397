"""A coordinator that orders anything in any order, against a running agent: what leaves is in its ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from adversary import MOLES, PRIVACY, Adversary, Attempt, Order, attacked
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from roundtable.core.identity.credentials import issue
from roundtable.privacy.secagg import ServerPhase

JOBS, NUMBERS, MODELS = st.sampled_from(sorted(PRIVACY)), st.integers(1, 3), st.integers(0, 2)
KEPT, PREPARED = st.sampled_from(["kept", "kept-noisy"]), st.tuples(NUMBERS, NUMBERS)
COHORTS = st.sampled_from([MOLES, MOLES, MOLES[:2], MOLES[1:]])
ORDERS = st.one_of(
    st.tuples(st.just("train"), JOBS, NUMBERS, NUMBERS, MODELS, COHORTS),
    # All that an attempt can give, with these silos called dropped once they have masked.
    st.tuples(st.just("sum"), JOBS, NUMBERS, NUMBERS, MODELS, COHORTS, st.sampled_from(["", "oak", "pine"])),
    st.tuples(st.just("evaluate"), JOBS, NUMBERS, NUMBERS, MODELS),
    st.tuples(st.just("advance"), st.integers(0, 9), st.sampled_from(["", "", "oak"])),
    st.tuples(st.just("replay"), st.integers(0, 99), st.integers(0, 9)),
    st.tuples(st.just("noise"), st.integers(0, 9), st.binary(max_size=80)),
    st.tuples(st.just("withdraw"), JOBS, NUMBERS, NUMBERS, st.booleans()),
    st.tuples(st.just("prepare"), KEPT, NUMBERS, NUMBERS, MODELS),
    st.tuples(
        st.just("mask"), KEPT, NUMBERS, NUMBERS, MODELS, COHORTS, PREPARED, st.sampled_from(["", "oak"])
    ),
    st.tuples(st.just("withdraw"), KEPT, NUMBERS, NUMBERS, st.just(False), st.just("prepare")),
    st.tuples(st.just("restart")),
)


@pytest.fixture(scope="session")
def moles(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Credentials of the coordinator's own silos, from the same authority."""
    folder = tmp_path_factory.mktemp("moles")
    for name in MOLES:
        issue(authority / "ca", name, "agent", folder / name)
    return folder


def test_a_sum_can_be_got_at_all(a_silo: Any, authority: Path, moles: Path) -> None:
    """The adversary plays well enough to be one: an attempt is unmasked, a second sum over others is not."""
    orders: list[Order] = [("sum", "sums", 1, 1, 0, MOLES, ""), ("sum", "sums", 1, 2, 0, MOLES, "oak")]
    found = asyncio.run(attacked(a_silo, authority, moles, orders))
    assert [attempt.server.phase for attempt in found.attempts] == [ServerPhase.DONE, ServerPhase.FAILED]
    assert found.attempts[0].server.survivors == ("hospital", *MOLES)
    assert [(e["round"], e["attempt"]) for e in found.lines if e["kind"] == "unmasked"] == [(1, 1)]
    assert found.left > 5


EVERYTHING: list[Order] = [
    ("train", "clear", 1, 1, 0, MOLES),
    ("evaluate", "clear", 1, 1, 1),
    ("train", "clear", 2, 1, 1, MOLES),
    ("train", "clear", 2, 2, 2, MOLES),
    ("restart",),
    ("evaluate", "clear", 2, 1, 2),
    ("evaluate", "clear", 2, 2, 0),
    ("train", "sums", 1, 1, 0, MOLES),
    ("train", "sums", 1, 1, 0, MOLES[:2]),
    ("sum", "sums", 1, 2, 0, MOLES, "oak"),
    ("replay", 1, 0),
    ("sum", "sums-2", 1, 1, 0, MOLES[:2], ""),
    ("restart",),
    ("advance", 2, ""),
    ("noise", 2, b"\x00" * 40),
    ("sum", "sums", 2, 1, 0, MOLES, ""),
    ("sum", "noisy", 1, 1, 0, MOLES, "pine"),
    ("sum", "noisy", 1, 2, 0, MOLES, ""),
    ("prepare", "kept", 1, 1, 0),
    ("mask", "kept", 1, 2, 0, MOLES, (1, 1), "oak"),
    ("mask", "kept", 2, 1, 0, MOLES[:2], (1, 1), ""),
    ("evaluate", "sums", 1, 1, 0),
    ("evaluate", "noisy", 1, 1, 0),
]


@example(EVERYTHING)
@given(st.lists(ORDERS, min_size=4, max_size=12))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_leaves_under_any_orders_is_in_the_ledger(
    a_silo: Any, authority: Path, moles: Path, orders: list[Order]
) -> None:
    assert not asyncio.run(attacked(a_silo, authority, moles, orders)).broken


@pytest.mark.slow
@given(st.lists(ORDERS, min_size=4, max_size=30))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_leaves_under_many_orders_is_in_the_ledger(
    a_silo: Any, authority: Path, moles: Path, orders: list[Order]
) -> None:
    assert not asyncio.run(attacked(a_silo, authority, moles, orders)).broken


def takes_part(attempt: Attempt) -> bool:
    """Whether a sum with the silo's update in it came out."""
    return attempt.server.phase is ServerPhase.DONE and "hospital" in attempt.server.survivors


def refusals(found: Adversary) -> list[str]:
    return [m.failure.detail for m in found.coordinator.heard if m.WhichOneof("message") == "failure"]


async def test_a_kept_update_is_in_one_sum_with_or_without_noise(
    a_silo: Any, authority: Path, moles: Path
) -> None:
    """Masked for a group that failed it is masked again; once a sum was unmasked, in no other round."""
    for job in ("kept", "kept-noisy"):
        orders: list[Order] = [
            ("prepare", job, 1, 1, 0),
            ("train", job, 1, 1, 0, MOLES, (1, 1)),
            ("restart",),
            ("mask", job, 1, 2, 0, MOLES, (1, 1), ""),
            ("mask", job, 1, 3, 0, MOLES[:2], (1, 1), ""),
            ("restart",),
            ("mask", job, 2, 1, 0, MOLES, (1, 1), ""),
        ]
        found = await attacked(a_silo, authority, moles, orders)
        assert [takes_part(attempt) for attempt in found.attempts] == [False, True, False, False]
        assert [(e["round"], e["attempt"]) for e in found.lines if e["kind"] == "unmasked"] == [(1, 2)]
        assert [e["round"] for e in found.lines if e["kind"] == "masked"] == [1]
        assert sum("a finished update is in one sum" in each for each in refusals(found)) == 2


async def test_a_kept_update_is_masked_as_one_of_its_own_model_only(
    a_silo: Any, authority: Path, moles: Path
) -> None:
    """Another model is refused; what is asked for without an update, or is gone, begins no attempt."""
    orders: list[Order] = [
        ("prepare", "kept", 1, 1, 0),
        ("mask", "kept", 1, 1, 1, MOLES, (1, 1), ""),
        ("mask", "kept", 1, 2, 0, MOLES, (2, 1), ""),
        ("train", "kept", 1, 2, 0, MOLES),
        ("train", "sums", 1, 2, 0, MOLES, (1, 1)),
        ("prepare", "sums", 1, 3, 0),
        ("prepare", "kept", 2, 1, 0),
        ("mask", "kept", 2, 1, 0, MOLES, (1, 1), ""),
        ("withdraw", "kept", 2, 1, False, "prepare"),
        ("mask", "kept", 2, 2, 0, MOLES, (2, 1), ""),
    ]
    found = await attacked(a_silo, authority, moles, orders)
    assert found.lines == []
    said = iter(refusals(found))
    for words in (
        "a sum is over updates of one model",
        "asks for the update of",
        "and it asks to train: in this job that has the phase 'prepare'",
        "to be masked, and the job keeps none",
        "the step's phase is 'prepare', and its work 'train'",
        "is no longer at this silo",
        "is no longer at this silo",
    ):
        assert words in next(said)


async def test_silos_that_trained_from_different_models_make_no_sum(
    a_silo: Any, authority: Path, moles: Path
) -> None:
    """The coordinator names to each the model that it has trained from: keys are bound to the silo's own."""
    orders: list[Order] = [("prepare", "kept", 1, 1, 0), ("mask", "kept", 1, 1, 0, MOLES, (1, 1), "", 2)]
    found = await attacked(a_silo, authority, moles, orders)
    assert [takes_part(attempt) for attempt in found.attempts] == [False]
    assert [e["kind"] for e in found.lines] == ["begun"]
