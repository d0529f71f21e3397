"""Which encoding a client gets: the shortest round under max_error, hysteresis, one choice a round."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.config import parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.observability.link_estimate import LinkEstimate, Rate
from roundtable.core.observability.transfer_figures import EncodingTrial, TransferFigures
from roundtable.engine.encoding_choice import EncodingChoice
from roundtable.engine.state import ClientRecord, EngineState, from_plain, to_plain

ELEMENTS = 25_000_000
ERRORS = {
    "float32": (4.0, 0.0),
    "int8": (1.008, 0.01),
    "int4(block=64)": (0.53, 0.12),
    "int4": (0.508, 0.16),
    "topk(ratio=0.05) | int8": (0.093, 0.57),
}
SPARSE = "topk(ratio=0.05) | int8"


def table(choice: str = "", transfer: str = "") -> TransferTable:
    text = f'task = "t"\n[transfer]\nup = "auto"\n{transfer}\n[transfer.choice]\n{choice}'
    return parse_job(text).transfer


def measured(
    rate: float, rest: float = 1.0, errors: dict[str, tuple[float, float]] = ERRORS
) -> EncodingChoice:
    """A client whose line and trials are known."""
    trials = {chain: EncodingTrial(chain, size, 1e-10, error) for chain, (size, error) in errors.items()}
    link = LinkEstimate(up=Rate(rate, 4.0))
    return EncodingChoice("int8", 1, -9, link=link, rest=Rate(rest, 4.0), trials=trials, elements=ELEMENTS)


def test_before_anything_is_measured_stated_bounds_decide() -> None:
    choice = EncodingChoice()
    choice.decide(table(), 1, 10)
    assert choice.encoding == "int8"


@pytest.mark.parametrize(
    ("rate", "rest", "chosen"),
    [
        (12.5e6, 1.0, SPARSE),  # 100 Mbit/s: 8 s of float32
        (1.25e9, 10.0, "float32"),  # 10 Gbit/s: nothing is to be gained
        (12.5e6, 600.0, "float32"),  # ten minutes of training
        (12.5e6, 60.0, "int8"),
    ],
)
def test_the_most_exact_of_those_that_make_the_round_shortest(rate: float, rest: float, chosen: str) -> None:
    choice = measured(rate, rest)
    why = choice.decide(table(), 2, 10)
    assert choice.encoding == chosen
    assert ("s a round with it at" in why) is (chosen != "int8")


def test_max_error_is_a_bound_for_each_kind() -> None:
    slow = 1e5
    for text, chosen in [
        ("feedback = 1.0", "int4(block=64)"),
        ("feedback = 1.0\nbiased = 0.1", "int8"),
        ("feedback = 1.5\nbiased = 0.1", SPARSE),
    ]:
        choice = measured(slow)
        choice.decide(table(f"[transfer.choice.max_error]\n{text}"), 2, 10)
        assert choice.encoding == chosen
    choice = measured(slow)
    choice.decide(table("gain = 0.02\n[transfer.choice.max_error]\nfeedback = 1.0"), 2, 10)
    assert choice.encoding == "int4"
    noisy = 'candidates = ["float32", "randomk(ratio=0.1)"]\n'
    choice = replace(
        measured(slow, errors={"float32": (4, 0), "randomk(ratio=0.1)": (0.4, 3.0)}), encoding="float32"
    )
    for cohort, chosen in ((4, "float32"), (10, "randomk(ratio=0.1)")):
        again = replace(choice)
        again.decide(table(noisy), 2, cohort)
        assert again.encoding == chosen


def test_what_loses_more_in_use_than_it_may_is_left_for_good() -> None:
    choice = replace(measured(1e6), encoding=SPARSE)
    figures = TransferFigures(2_000_000, 4 * ELEMENTS, up_seconds=2.0, error=2.5)
    choice.learn(table(), figures, 10, now=4.0)
    why = choice.decide(table(), 2, 10)
    assert choice.encoding == "int4(block=64)"
    assert "has lost 2.50 of the update's norm" in why
    for round in range(3, 20):
        choice.decide(table(), round, 10)
    assert choice.encoding == "int4(block=64)"


@settings(max_examples=60)
@given(st.lists(st.floats(0.95, 1.05), min_size=20, max_size=40), st.floats(1e5, 1e9))
def test_a_line_that_wavers_by_a_twentieth_changes_nothing_once_chosen(
    wavering: list[float], rate: float
) -> None:
    choice = measured(rate)
    choice.decide(table(), 2, 10)
    choice.decide(table(), 5, 10)
    chosen, changes = choice.encoding, 0
    for round, factor in enumerate(wavering, start=6):
        choice.link = LinkEstimate(up=Rate(rate * factor, 4.0))
        changes += bool(choice.decide(table(), round, 10))
    assert changes <= 1, (chosen, choice.encoding)


def test_a_retry_and_a_restart_give_the_same_choice() -> None:
    choice = measured(12.5e6)
    assert choice.decide(table(), 2, 10)
    choice.link = LinkEstimate(up=Rate(1e12, 4.0))
    assert choice.decide(table(), 2, 10) == ""
    assert choice.encoding == SPARSE
    plain = json.loads(json.dumps(vars(choice), default=lambda value: vars(value)))
    again = EncodingChoice.from_plain(plain)
    assert again == choice
    assert again.decide(table(), 2, 10) == ""
    assert again.decide(table(), 4, 10)
    assert again.encoding == "float32"


def test_the_policy_of_bandwidths() -> None:
    by_rate = table('policy = "bandwidth"')
    for rate, chosen in [
        (1e6, "minmax(bits=16)"),
        (5e5, "minmax(bits=8)"),
        (1e5, "minmax(bits=4)"),
        (5e6, "float32"),
        (5e7, "topk(ratio=0.1)"),
    ]:
        choice = replace(measured(rate), encoding="float32")
        choice.decide(by_rate, 2, 10)
        assert choice.encoding == chosen
        assert by_rate.allows(chosen)
    choice, seen = replace(measured(5e7), encoding="float32"), set()
    for round in range(2, 60):
        faster = TransferFigures(int(8e7), 4 * ELEMENTS, up_seconds=1e-3 * 0.5**round)
        choice.learn(by_rate, faster, 10, now=1.0)
        choice.decide(by_rate, round, 10)
        seen.add(choice.encoding)
    assert choice.encoding == "topk(ratio=0.5)"
    assert all(map(by_rate.allows, seen))
    assert not by_rate.allows("topk(ratio=0.9)")
    assert not by_rate.allows("int8")
    choice.link = LinkEstimate(up=Rate(12.6e6, 4.0))
    choice.decide(by_rate, 60, 10)
    choice.link = LinkEstimate(up=Rate(12.4e6, 4.0))
    assert choice.decide(by_rate, 62, 10) == ""


def test_candidates_without_a_safe_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="a candidate is needed whose stated bound keeps"):
        table(f'candidates = ["{SPARSE}", "int4"]')
    with pytest.raises(ConfigError, match="cannot be tried on a sample"):
        table('candidates = ["float32", "topk(ratio=0.05, per=layer)"]')


def test_the_snapshot_holds_it() -> None:
    state = EngineState("m", 0, clients={"alder": ClientRecord(choice=measured(1e6))})
    assert from_plain(json.loads(json.dumps(to_plain(state)))).clients == state.clients
