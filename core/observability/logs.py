"""Log lines that say where they belong: job, round, attempt, phase and silo, for people or for programs.

What a task of the event loop works on is set once with `belongs_to`; every line that is logged below it,
also by tasks that it starts, carries it. `extra={"job": …}` of a single line wins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from typing_extensions import override

LogFormat = Literal["console", "json"]
FIELDS = ("job", "round", "attempt", "phase", "silo")
CONSOLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_ALIASES = {"silo": "site"}
_place: ContextVar[Callable[[], Mapping[str, Any]] | None] = ContextVar("place", default=None)


def belongs_to(place: Callable[[], Mapping[str, Any]]) -> None:
    """From now on lines of this task belong there; `place` is asked for each line."""
    _place.set(place)


def place_of(record: logging.LogRecord) -> dict[str, Any]:
    """Where a line belongs; None for what does not apply to it."""
    asked = _place.get()
    around = asked() if asked is not None else {}
    found = {}
    for name in FIELDS:
        own = getattr(record, name, None) or getattr(record, _ALIASES.get(name, name), None)
        found[name] = own or around.get(name) or None
    return found


class ConsoleFormatter(logging.Formatter):
    """A line for people, with its place behind it in brackets."""

    def __init__(self) -> None:
        super().__init__(CONSOLE)

    @override
    def format(self, record: logging.LogRecord) -> str:
        line, place = super().format(record), place_of(record)
        told = " ".join(f"{name}={value}" for name, value in place.items() if value is not None)
        head, newline, rest = line.partition("\n")
        return f"{head} [{told}]{newline}{rest}" if told else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the five places, and the traceback."""

    def __init__(self, silo: str = "") -> None:
        super().__init__()
        self._silo = silo or None

    @override
    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **place_of(record),
        }
        values["silo"] = values["silo"] or self._silo
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, default=str)


def write_logs(kind: LogFormat, silo: str = "") -> None:
    """The process's log lines take this form from now on; `silo` is whose process it is."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(silo) if kind == "json" else ConsoleFormatter())
