"""The command line in a process that may not write everywhere, as root otherwise may."""

from __future__ import annotations

import os
import subprocess
import sys

from become import POWERLESS, become


def powerless(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`roundtable` with these arguments; what a folder's mode forbids its owner is forbidden."""
    words = [sys.executable, "-P", "-m", "roundtable", *[str(argument) for argument in arguments]]
    return subprocess.run(
        become(POWERLESS, *words) if os.getuid() == 0 else words,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def errors_of(text: str) -> list[str]:
    """The lines with which a command ends that failed."""
    return [line for line in text.splitlines() if line.startswith("Error: ")]
