"""The command line in a process that may not write everywhere, as root otherwise may."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def powerless(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`roundtable` with these arguments; what a folder's mode forbids its owner is forbidden."""
    words = [sys.executable, "-P", "-m", "roundtable", *[str(argument) for argument in arguments]]
    return subprocess.run(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=_obey_modes if os.getuid() == 0 else None,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _obey_modes() -> None:
    # From the program that is started next on, root is an owner like any other.
    if _LIBC.prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


def errors_of(text: str) -> list[str]:
    """The lines with which a command ends that failed."""
    return [line for line in text.splitlines() if line.startswith("Error: ")]
