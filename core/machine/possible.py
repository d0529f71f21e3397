"""What of Roundtable this system can run, judged by what it has and not by its name.

What it cannot is refused before it begins, with the reason. docs/how-to/platforms.md has the table.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from roundtable.core.errors import ResourceError
from roundtable.core.machine.process_facts import held_memory

_ELSEWHERE = "docs/how-to/platforms.md has what runs where"


def _no_folder_locks() -> str | None:
    if hasattr(os, "O_DIRECTORY"):
        return None
    return "it locks and syncs folders, which this system cannot; run it on Linux or macOS, or under WSL"


def _no_descriptors() -> str | None:
    if hasattr(socket, "send_fds"):
        return None
    return (
        "worker processes are handed open files and memory, which this system cannot; "
        'set backend = "auto" or "sequential"'
    )


def _no_ranks() -> str | None:
    if hasattr(os, "O_PATH") and hasattr(socket, "AF_UNIX"):
        return None
    return "its ranks are reached and ended in ways that only Linux has; leave out [cluster] here"


def _no_held_memory() -> str | None:
    if held_memory() is not None:
        return None
    return (
        "this system does not tell how much memory a process holds; leave it out, or run the agent under WSL"
    )


def _no_users() -> str | None:
    if hasattr(os, "getgrouplist"):
        return None
    return "services are installed for systemd alone; the page on platforms says what to use here"


_WHY_NOT: dict[str, Callable[[], str | None]] = {
    "a coordinator": _no_folder_locks,
    "a relay": _no_folder_locks,
    'simulation.backend = "processes"': _no_descriptors,
    "[cluster]": _no_ranks,
    "[policy] max_memory": _no_held_memory,
    "install": _no_users,
}


def why_not(what: str) -> str | None:
    """Why this system cannot do that, one of the names above; None where it can."""
    return _WHY_NOT[what]()


def must_be_possible(what: str) -> None:
    """Raises ResourceError with the reason where this system cannot do that."""
    if (reason := why_not(what)) is not None:
        raise ResourceError(f"{what} does not work on this system: {reason} ({_ELSEWHERE})")
