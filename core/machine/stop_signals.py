"""How a process is told to stop, and how it ends others, by the signals that the system has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_SIGHUP = getattr(signal, "SIGHUP", None)
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""What no process can refuse: on Windows every signal to another process is."""
ENDINGS: tuple[signal.Signals, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    # Ctrl-Break in a console of Windows, and what a parent can send there.
    *((signal.SIGBREAK,) if hasattr(signal, "SIGBREAK") else ()),
)


def on_signals(handler: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Calls `handler` in the running event loop at each signal that ends a process; returns what undoes it.

    Undone, a signal does again what it did before. Only in the main thread.
    """
    loop = asyncio.get_running_loop()
    return _undoing([_heeded(loop, number, handler) for number in ENDINGS])


def on_hangup(handler: Callable[[], None]) -> None:
    """Calls it in the running event loop at SIGHUP, where the system has that."""
    if _SIGHUP is not None:
        _heeded(asyncio.get_running_loop(), _SIGHUP, lambda number: handler())


def on_closed(handler: Callable[[int, Any], None]) -> None:
    """Calls it, outside of an event loop, when the process is told to end or its terminal is closed."""
    for number in (signal.SIGTERM, *((_SIGHUP,) if _SIGHUP is not None else ())):
        signal.signal(number, handler)


def leave_signals_to_owner() -> None:
    """Ignores what ends a process that is told nothing else: Ctrl-C, a closed terminal and a service's reload
    reach all of its processes, and whoever started this one says what is to end.

    Only in the main thread; what it starts inherits it.
    """
    for number in (signal.SIGINT, *((_SIGHUP,) if _SIGHUP is not None else ())):
        signal.signal(number, signal.SIG_IGN)


def kill_group(process: subprocess.Popen[bytes] | asyncio.subprocess.Process, number: int = KILL) -> None:
    """Signals a process that was started with `start_new_session` and all that it has started.

    Where there are no process groups the process alone is ended.
    """
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.kill()


def _heeded(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, handler: Callable[[signal.Signals], None]
) -> Callable[[], object]:
    try:
        loop.add_signal_handler(number, handler, number)
    except NotImplementedError:
        # Windows' event loop; its sockets wake it for a signal, and the handler then runs between two steps.
        before = signal.signal(number, lambda *seen: loop.call_soon_threadsafe(handler, number))
        return lambda: signal.signal(number, before)
    return lambda: loop.remove_signal_handler(number)


def _undoing(steps: list[Callable[[], object]]) -> Callable[[], None]:
    def undo() -> None:
        for step in steps:
            step()

    return undo
