"""Runs a command with less power than this process has: as another user, or bound by files' modes.

    python become.py postgres COMMAND...
    python become.py powerless COMMAND...

A process of its own, for a process with gRPC in it must not run anything between fork and exec: its
threads are told of the fork, and abort when their files are closed.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import sys

POWERLESS = "powerless"
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1


def become(who: str, *command: str) -> list[str]:
    """Gives the command line that runs `command` as `who`."""
    return [sys.executable, "-I", __file__, who, *command]


def _obey_modes() -> None:
    # From the program that is started next on, root is an owner like any other.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


if __name__ == "__main__":
    who, *command = sys.argv[1:]
    if who == POWERLESS:
        _obey_modes()
    else:
        entry = pwd.getpwnam(who)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    os.execv(command[0], command)
