"""Runs a program that prints a line when a round is done: when each came, and what time of processors and
memory its processes have taken."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Measured:
    """One run: when each round ended (seconds from the command), processor seconds of all its processes by
    then, the largest memory in MiB, what it said."""

    ends: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    memory: float = 0.0
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def per_round(self) -> float:
        """Median seconds of a round of the second half: the first finds workers that are still starting."""
        spent = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        return statistics.median(spent[len(spent) // 2 :])

    @property
    def processor_per_round(self) -> float:
        """Mean processor seconds of a round of the second half; the system counts hundredths of a second."""
        middle = (len(self.processor) - 1) // 2
        return (self.processor[-1] - self.processor[middle]) / (len(self.processor) - 1 - middle)


def measure(command: list[str], environment: dict[str, str]) -> Measured:
    """Runs a contestant; RuntimeError with its last words if it fails."""
    result, done = Measured(), threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    words: list[str] = []
    watchers = [
        threading.Thread(target=_watch_memory, args=(process.pid, result, done)),
        threading.Thread(target=lambda: words.extend(process.stderr or ())),
    ]
    for watcher in watchers:
        watcher.start()
    try:
        for line in process.stdout or ():
            if line.startswith("round "):
                result.ends.append(time.perf_counter() - start)
                result.processor.append(sum(_processor(pid) for pid in _tree(process.pid)))
            elif line.startswith("{"):
                result.said = json.loads(line)
        code = process.wait()
    finally:
        # Ctrl-C reaches the contestant too; the watchers would wait for ever.
        process.terminate()
        done.set()
        for watcher in watchers:
            watcher.join()
    if code or len(result.ends) < 2:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {''.join(words)[-2000:]}")
    return result


def _watch_memory(root: int, result: Measured, done: threading.Event) -> None:
    while not done.wait(0.5):
        result.memory = max(result.memory, sum(_proportional(pid) for pid in _tree(root)) / 1024)


def _tree(root: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(parents.get(pid, ()))
    return found


def _processor(pid: int) -> float:
    """Processor seconds of a process and of those of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _proportional(pid: int) -> int:
    """Memory in KiB, what is shared divided among those that share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
