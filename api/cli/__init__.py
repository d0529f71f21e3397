"""The command line: `roundtable COMMAND`."""

from __future__ import annotations

import sys
from types import TracebackType

_SHOW = sys.excepthook


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Nothing for Ctrl-C, which ends the process by its signal: it may come while commands are imported."""
    if not issubclass(kind, KeyboardInterrupt):
        _SHOW(kind, error, trace)


sys.excepthook = _show
