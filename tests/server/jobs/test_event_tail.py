"""The newest events in memory are those of the database, or nothing is claimed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roundtable.server.jobs.job_inbox import MOST, EventTail
from roundtable.server.store import EventRow


@given(
    start=st.integers(0, 5),
    batches=st.lists(st.integers(0, MOST), max_size=4),
    asked=st.integers(1, 4 * MOST),
    most=st.integers(1, MOST),
)
def test_what_is_held_is_the_same_as_what_is_stored(
    start: int, batches: list[int], asked: int, most: int
) -> None:
    stored = [EventRow(number, 0.0, "noted", f"event {number}") for number in range(1, start + 1)]
    tail = EventTail(start)
    for count in batches:
        new = [EventRow(len(stored) + 1 + more, 0.0, "noted", "later") for more in range(count)]
        stored += new
        tail.add(new)
    held, wanted = tail.since(asked, most), [row for row in stored if row.sequence >= asked][:most]
    assert held is None or held == wanted
    oldest = max(start, len(stored) - MOST) + 1
    assert (held is not None) == (asked >= oldest)
