"""What browsers are sent, put together as they do it, is what the board shows, however slowly they read."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from roundtable.page.board import MOST_WAITING, Board, BoardReader

rows = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("show"), st.sampled_from(["jobs", "silos"]), rows),
        st.tuples(st.just("change"), st.sampled_from(["jobs", "silos"]), rows),
        st.tuples(st.just("add"), st.lists(st.integers(), max_size=3), st.none()),
        st.tuples(st.just("read"), st.none(), st.none()),
        st.tuples(st.just("flood"), st.integers(1, 2 * MOST_WAITING), st.none()),
    ),
    max_size=30,
)


class Browser:
    """Does with messages what live-worker.js does."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.lines: list[Any] = []

    def read(self, data: bytes) -> None:
        for event in data.decode().split("\n\n"):
            if not event:
                continue
            message = json.loads(event.removeprefix("data: "))
            if message.get("whole"):
                self.tables, self.lines = {}, []
            for table, changed in message.get("set", {}).items():
                self.tables[table] = {**self.tables.get(table, {}), **changed}
            for table, keys in message.get("gone", {}).items():
                for key in keys:
                    self.tables.get(table, {}).pop(key, None)
            self.lines = [*self.lines, *message.get("lines", [])][-5:]


@given(steps)
def test_a_browser_holds_what_the_board_shows(plan: list[tuple[str, Any, Any]]) -> None:
    board, reader, browser = Board("overview", most_lines=5), BoardReader(), Browser()
    board.show("jobs", {"a": 0})
    board.join(reader)
    tables: dict[str, dict[str, Any]] = {"jobs": {"a": 0}}
    lines: list[Any] = []
    for what, first, second in plan:
        if what == "show":
            board.show(first, second)
            tables[first] = dict(second)
        elif what == "change":
            board.change(first, second)
            tables[first] = {**tables.get(first, {}), **second}
        elif what == "add":
            board.add(first)
            lines = [*lines, *first][-5:]
        elif what == "flood":
            for number in range(first):
                board.show("jobs", {"z": number})
            tables["jobs"] = {"z": first - 1}
        else:
            browser.read(reader.take())
    browser.read(reader.take())
    assert {name: table for name, table in browser.tables.items() if table} == {
        name: table for name, table in tables.items() if table
    }
    assert browser.lines == lines


def test_a_browser_that_never_reads_costs_a_bounded_amount() -> None:
    board, reader = Board("overview"), BoardReader()
    board.join(reader)
    for number in range(10_000):
        board.show("jobs", {"a": "x" * 100, "b": number})
    assert len(reader.take()) < 1000


def test_what_has_not_changed_is_not_sent() -> None:
    board, reader = Board("overview"), BoardReader()
    board.join(reader)
    reader.take()
    board.show("jobs", {"a": 1})
    reader.take()
    board.show("jobs", {"a": 1})
    assert not reader.woken.is_set()
    assert reader.take() == b""
