"""Runs of a sweep side by side, each in a process of its own that leaves everything in its run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundtable.core.errors import ResourceError

_LOOK = 0.05


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run of a sweep: its name, its settings, and the folder that it goes to."""

    name: str
    overrides: Mapping[str, Any]
    folder: Path

    @property
    def outcome(self) -> Path:
        """The file in which its process says how it ended, until that is read."""
        return self.folder.with_name(f".{self.name}.outcome")


def threads_each(at_once: int) -> int:
    """The cores of each of so many runs at a time."""
    return max(1, (os.cpu_count() or 1) // at_once)


def run_side_by_side(
    job: Path,
    runs: Sequence[PlannedRun],
    at_once: int,
    done: Callable[[PlannedRun, str, bool], None],
    packed: bytes | None = None,
) -> None:
    """Runs all, so many at a time; `done` is told of each that has ended, why it failed ("" where it did not
    say so), and whether it was refused before it began.

    `packed` is a task that only this process has, from `pack_task`; without it the job's name of the task
    counts.
    The cores are divided among them. Where one fails, the others go on. An interruption stops all: each goes
    on where it stopped when called again.
    """
    left, running = deque(runs), dict[PlannedRun, subprocess.Popen[bytes]]()
    threads = str(threads_each(at_once))
    try:
        while left or running:
            while left and len(running) < at_once:
                planned = left.popleft()
                running[planned] = _start(job, planned, threads, packed)
            for planned in [planned for planned, process in running.items() if process.poll() is not None]:
                said = _outcome(planned, running.pop(planned).returncode)
                done(planned, str(said.get("error", "")), bool(said.get("refused")))
            time.sleep(_LOOK)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _start(job: Path, planned: PlannedRun, threads: str, packed: bytes | None) -> subprocess.Popen[bytes]:
    request: dict[str, Any] = {"job": str(job), "folder": str(planned.folder)}
    request["overrides"] = dict(planned.overrides)
    request |= {"outcome": str(planned.outcome), "packed": 0 if packed is None else len(packed)}
    planned.folder.parent.mkdir(parents=True, exist_ok=True)
    planned.outcome.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "roundtable.simulation.run_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
    except OSError as error:
        raise ResourceError(f"no process for a run could be started: {error}") from error
    assert process.stdin is not None
    # One that ends before it has read everything is heard of by its status.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(request).encode() + b"\n" + (packed or b""))
    return process


def _outcome(planned: PlannedRun, status: int) -> dict[str, Any]:
    """What the process said; one that died says nothing."""
    try:
        said = json.loads(planned.outcome.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = None
    planned.outcome.unlink(missing_ok=True)
    if isinstance(said, dict) and ("rounds" in said or "error" in said):
        return said
    return {"error": f"its process ended with status {status}; called again, it goes on"}
