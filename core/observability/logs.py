"""Log lines that say where they belong: job, round, attempt, phase, silo and request, for people or programs.

What a task of the event loop works on is set once with `belongs_to`; every line that is logged below it,
also by tasks that it starts, carries it. `extra={"job": …}` of a single line wins. A call of an agent has an
identifier that goes with it, so that its lines at the silo and at the coordinator can be laid side by side.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from typing_extensions import override

from roundtable.core.foreign_text import json_text, printable, printable_lines

LogFormat = Literal["console", "json"]
LineKind = Literal["agent", "figures", "output"]
"""What a line of an agent tells: its own fixed words, figures of training, what a task prints."""
FIELDS = ("job", "round", "attempt", "phase", "silo", "request")
REQUEST_KEY = "roundtable-request"
"""The metadata of a call that holds its identifier."""
CONSOLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_MOST = 4_000
_ALIASES = {"silo": "site"}
_place: ContextVar[Callable[[], Mapping[str, Any]] | None] = ContextVar("place", default=None)
_request: ContextVar[str] = ContextVar("request", default="")


def belongs_to(place: Callable[[], Mapping[str, Any]]) -> None:
    """Gives every line that this asyncio task logs from now on a place; `place` is called for each line."""
    _place.set(place)


@contextmanager
def requesting(identifier: str = "") -> Iterator[str]:
    """Gives every line within the block, and of tasks that it starts, the identifier of a call.

    A fresh one without `identifier`.
    """
    token = _request.set(identifier or secrets.token_hex(6))
    try:
        yield _request.get()
    finally:
        _request.reset(token)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """The identifier of the call that is made here, as it travels."""
    return ((REQUEST_KEY, _request.get()),) if _request.get() else ()


def shareable(kind: LineKind) -> dict[str, LineKind]:
    """The `extra` of a line of an agent that its silo may share with operators; no other is shared."""
    return {"shareable": kind}


def place_of(record: logging.LogRecord) -> dict[str, Any]:
    """Job, round, attempt, phase, silo and request of a line; None for what does not apply to it."""
    asked = _place.get()
    around = {"request": _request.get(), **(asked() if asked is not None else {})}
    place = {}
    for name in FIELDS:
        own = getattr(record, name, None) or getattr(record, _ALIASES.get(name, name), None)
        place[name] = own or around.get(name) or None
    return place


class ConsoleFormatter(logging.Formatter):
    """A line for people, with its place behind it in brackets.

    Messages may hold words of silos and operators: a record is one line whatever they wrote, and only the
    lines of its traceback follow, indented.
    """

    def __init__(self) -> None:
        super().__init__(CONSOLE)

    @override
    def format(self, record: logging.LogRecord) -> str:
        record.message = printable(_message(record), _MOST)
        record.asctime = self.formatTime(record)
        place = {name: value for name, value in place_of(record).items() if value is not None}
        brackets = " ".join(f"{name}={printable(value, _MOST)}" for name, value in place.items())
        head = self.formatMessage(record) + (f" [{brackets}]" if brackets else "")
        return "\n".join([head, *(f"  {line}" for line in self._trace(record))])

    def _trace(self, record: logging.LogRecord) -> list[str]:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return [line for text in (trace, stack) if text for line in printable_lines(text)]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the six places, and the traceback."""

    def __init__(self, silo: str = "") -> None:
        super().__init__()
        self._silo = silo or None

    @override
    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record)[:_MOST],
            **place_of(record),
        }
        values["silo"] = values["silo"] or self._silo
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = self.formatStack(record.stack_info)
        return json_text(values)


def write_logs(kind: LogFormat, silo: str = "") -> None:
    """The process's log lines take this form from now on; `silo` is whose process it is.

    Warnings of Python become records too, and so do the traceback that ends the process, one that ends a
    thread, and one of an object that fails where nobody can catch that.
    """
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(silo) if kind == "json" else ConsoleFormatter())
    logging.captureWarnings(True)
    sys.excepthook = _log_the_end
    threading.excepthook = _log_a_thread
    sys.unraisablehook = _log_unraisable


def announce(message: str, *, error: bool = False) -> None:
    """Prints a line that belongs to the process's log whatever its level: JSON where the log is JSON.

    On standard output, where those who start a service wait for it to be ready; on standard error where it
    says why the process ends.
    """
    json_log = _json_formatter()
    level = logging.ERROR if error else logging.INFO
    if json_log is None:
        line = "\n".join(printable_lines(message, _MOST))
    else:
        line = json_log.format(logging.LogRecord("roundtable", level, "", 0, message, None, None))
    print(line, file=sys.stderr if error else sys.stdout, flush=True)


def _json_formatter() -> JsonFormatter | None:
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return next((each for each in formatters if isinstance(each, JsonFormatter)), None)


def _log_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("roundtable").critical("the process ends", exc_info=(kind, error, trace))


def _log_a_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is None or issubclass(ended.exc_type, SystemExit):
        return
    name = ended.thread.name if ended.thread is not None else "a thread"
    failure = (ended.exc_type, ended.exc_value, ended.exc_traceback)
    logging.getLogger("roundtable").error("%s ends", name, exc_info=failure)


def _log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    said = failed.err_msg or "an exception was ignored in"
    failure = failed.exc_value
    logging.getLogger("roundtable").error("%s %r", said, failed.object, exc_info=failure)


def _message(record: logging.LogRecord) -> str:
    """The line's message; one that its arguments do not fit must not end as a traceback on standard error."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - whatever formatting raises, the line is written
        return f"{record.msg!r} does not fit its arguments {record.args!r}: {type(error).__name__}"
