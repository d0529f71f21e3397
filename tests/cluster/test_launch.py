"""Ranks that are forked by the launcher's process: none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundtable.cluster.agent.launcher import _options
from roundtable.cluster.plan.resources import Resources


def alive(session: int) -> list[str]:
    """The processes of a session that have not ended, as the kernel tells them."""
    texts = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = each.read_text()
        except OSError:
            continue
        state, _, _, of = text.rpartition(")")[2].split()[:4]
        if int(of) == session and state != "Z":
            texts.append(text)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_launcher_however_it_ends(number: int, tmp_path: Path) -> None:
    resources = Resources(1, 2, 1 << 30, "cpu")
    command = [sys.executable, "-P", "-m", "roundtable.cluster.agent.launch", str(os.getpid()), str(tmp_path)]
    # No agent listens in the folder: the ranks wait for one.
    with subprocess.Popen([*command, *_options(0, resources)], start_new_session=True) as launcher:
        # The launcher, what tracks semaphores, what forks, two ranks.
        while len(alive(launcher.pid)) < 5:
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.send_signal(number)
    ended = time.monotonic()
    while left := alive(launcher.pid):
        assert time.monotonic() - ended < 60, left
        time.sleep(0.05)
