"""How much each part of a service logs: settings that hold from the start, and anew at SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from roundtable.core.errors import RoundtableError
from roundtable.core.machine.stop_signals import on_hangup

LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
"""From the least to the most."""
LogLevels = Mapping[str, LogLevel]
_OURS = "roundtable"
_log = logging.getLogger("roundtable.logs")
DESCRIPTION = (
    "how much a part logs: name of a logger = debug, info, warning or error; root is all that is not named. "
    "Read anew at SIGHUP"
)


class Verbosity:
    """The levels of this process; `read` gives those that the settings name now."""

    def __init__(self, levels: LogLevels, read: Callable[[], LogLevels] | None = None) -> None:
        self._read = read
        self._named: dict[str, int] = {}
        ours = logging.getLogger(_OURS)
        ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
        self.set(levels)

    def set(self, levels: LogLevels) -> None:
        """These loggers log so much from now on; those that were named before, and are not, as at first."""
        for name, before in self._named.items():
            logging.getLogger(name).setLevel(before)
        self._named = {name: logging.getLogger(name).level for name in levels}
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level.upper())

    def read_anew(self) -> None:
        """Takes the levels that the settings name now. A file that is wrong changes nothing."""
        try:
            levels = self._read() if self._read is not None else {}
        except RoundtableError as error:
            _log.error("SIGHUP: nothing is changed: %s", error)
            return
        self.set(levels)
        said = ", ".join(f"{name} = {level}" for name, level in levels.items()) or "as they are by default"
        # At a level that is always shown: somebody has asked for it.
        _log.warning(
            "SIGHUP: log levels are %s; certificates, revocations and tokens are read anew by themselves, "
            "other settings at the next start",
            said,
        )

    def heed(self) -> None:
        """Reads anew at SIGHUP, in the running event loop, where the system has that signal."""
        on_hangup(self.read_anew)
