"""What a topic of the page shows now, and what of it has changed: told once, sent to all who look at it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

MOST_WAITING = 64
"""Messages that may wait for a browser; with more it is sent the whole anew."""


class BoardReader:
    """One browser's stream: what waits to be written to it, of all the boards that it looks at."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.boards: list[Board] = []
        self._waiting: list[bytes] = []
        self._behind = False

    def hear(self, message: bytes) -> None:
        """Takes a message, or, where too many wait, forgets them all for the boards' present states."""
        self.woken.set()
        if self._behind:
            return
        self._waiting.append(message)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.clear()
            self._behind = True

    def take(self) -> bytes:
        """All that waits, in one piece."""
        self.woken.clear()
        if self._behind:
            self._waiting = [board.whole() for board in self.boards]
            self._behind = False
        waiting, self._waiting = self._waiting, []
        return b"".join(waiting)


class Board:
    """A topic: tables of rows by key, single values among them, and lines that only grow.

    A message is `{"topic", "set": {table: {key: row}}, "gone": {table: [key]}, "lines": [..]}`, or with
    `"whole": true` everything that the browser should now hold.
    """

    def __init__(self, topic: str, most_lines: int = 1000) -> None:
        self.topic = topic
        self.readers: set[BoardReader] = set()
        self._tables: dict[str, dict[str, Any]] = {}
        self._lines: list[Any] = []
        self._most = most_lines

    def show(self, table: str, rows: Mapping[str, Any]) -> None:
        """The table has these rows now."""
        before = self._tables.get(table, {})
        changed = {key: row for key, row in rows.items() if key not in before or before[key] != row}
        gone = [key for key in before if key not in rows]
        self._tables[table] = dict(rows)
        if changed or gone:
            self._tell({"set": {table: changed}, "gone": {table: gone}})

    def change(self, table: str, rows: Mapping[str, Any]) -> None:
        """These rows of the table are new, or others than before; the rest stays."""
        self._tables[table] = {**self._tables.get(table, {}), **rows}
        if rows:
            self._tell({"set": {table: rows}})

    def add(self, lines: Sequence[Any]) -> None:
        """Lines that follow those before; the oldest are forgotten."""
        if lines:
            self._lines = [*self._lines, *lines][-self._most :]
            self._tell({"lines": list(lines)})

    def join(self, reader: BoardReader) -> None:
        """The reader is told the whole, and what changes from now on."""
        self.readers.add(reader)
        reader.boards.append(self)
        reader.hear(self.whole())

    def leave(self, reader: BoardReader) -> None:
        """The reader hears no more."""
        self.readers.discard(reader)

    def wake(self) -> None:
        """Wakes all readers, whether or not there is something to read."""
        for reader in self.readers:
            reader.woken.set()

    def whole(self) -> bytes:
        """All of it as a message."""
        return _event({"topic": self.topic, "whole": True, "set": self._tables, "lines": self._lines})

    def _tell(self, change: Mapping[str, Any]) -> None:
        if self.readers:
            message = _event({"topic": self.topic, **change})
            for reader in self.readers:
                reader.hear(message)


def _event(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"data: {text}\n\n".encode()
