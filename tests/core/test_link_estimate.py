"""The measured line: short transfers tell nothing, one bad one moves it by a step, the newest weigh most."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.observability.link_estimate import ENOUGH, SHORT, UNKNOWN_LINK, LinkEstimate, Rate
from roundtable.core.observability.transfer_figures import TransferFigures


def test_short_cached_and_resumed_transfers_change_nothing() -> None:
    known = UNKNOWN_LINK.after(TransferFigures(ENOUGH, ENOUGH, ENOUGH, ENOUGH, 1.0, 2.0, 0.5))
    assert (known.up.value, known.down.value, known.encoding.value) == (ENOUGH, ENOUGH / 2, 2 * ENOUGH)
    short = TransferFigures(SHORT - 1, SHORT - 1, 0, 0, 1e-4, None, 1e-6)
    assert known.after(short) == known
    assert known.after(TransferFigures(ENOUGH, ENOUGH, up_seconds=None)) == known


def test_a_line_that_stood_still_once_moves_the_estimate_by_a_step() -> None:
    rate = Rate()
    for _ in range(20):
        rate = rate.after(ENOUGH, 1.0)
    slow = rate.after(ENOUGH, 1000.0)
    assert rate.value / slow.value == pytest.approx(1000**0.25, rel=0.05)
    for _ in range(12):
        slow = slow.after(ENOUGH, 1.0)
    assert rate.value / slow.value < 1.06


def test_the_newest_weigh_most_and_a_slower_line_is_believed_in_time() -> None:
    rate = Rate().after(ENOUGH, 1.0)
    for _ in range(16):
        rate = rate.after(ENOUGH, 10.0)
    assert rate.value == pytest.approx(ENOUGH / 10, rel=0.05)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(0, 1e6)), max_size=30))
def test_the_estimate_stays_between_what_was_measured(
    told: list[tuple[float, float]],
) -> None:
    rate, seen = Rate(), []
    for amount, seconds in told:
        rate = rate.after(amount, seconds)
        if amount >= SHORT:
            seen.append(amount / max(seconds, 1e-6))
    assert rate.weight <= 4.0 + 1e-9
    assert not seen or min(seen) * (1 - 1e-9) <= rate.value <= max(seen) * (1 + 1e-9)
    assert math.isfinite(rate.value)
    link = LinkEstimate(up=rate)
    assert LinkEstimate.from_plain(link.plain()) == link
