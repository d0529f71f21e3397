"""What a run takes of the machine: memory, cores and GPU memory, of this process and its workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from roundtable.core.machine.process_facts import peak_memory, proc_files, proc_text


@dataclass(frozen=True)
class Usage:
    """memory: resident bytes, what processes share counted once; None where the system does not tell.
    cores: cores kept busy since the last look. gpu_memory: bytes in use on the GPU, by whomever; None where
    there is none."""

    memory: int | None
    cores: float
    gpu_memory: int | None = None

    @override
    def __str__(self) -> str:
        gpu = "" if self.gpu_memory is None else f", GPU {self.gpu_memory / (1 << 30):.1f} GiB"
        memory = "" if self.memory is None else f"{self.memory / (1 << 20):.0f} MiB, "
        return f"{memory}{self.cores:.1f} cores{gpu}"


class Meter:
    """Looks now and then; elsewhere than on Linux it sees this process alone."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), self._seconds())

    def look(self) -> Usage:
        """What is in use now."""
        now, seconds = time.monotonic(), self._seconds()
        passed, busy = now - self._last[0], seconds - self._last[1]
        self._last = (now, seconds)
        # A worker that has ended takes its seconds with it.
        return Usage(_memory(), max(0.0, busy) / passed if passed else 0.0, _gpu_memory())

    def _seconds(self) -> float:
        own = time.process_time()
        return own + sum(_processor_seconds(process) for process in _descendants(os.getpid()))


def _descendants(process: int) -> Iterator[int]:
    for thread in proc_files(f"{process}/task/*/children"):
        for child in map(int, proc_text(thread).split()):
            yield child
            yield from _descendants(child)


def _memory() -> int | None:
    if not (own := _status(os.getpid(), "VmRSS")):
        return peak_memory()
    return own + sum(_status(process, "RssAnon") for process in _descendants(os.getpid()))


def _status(process: int, field: str) -> int:
    for line in proc_text(f"{process}/status").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    return 0


def _processor_seconds(process: int) -> float:
    # After the command's name, which may hold anything, user and system time are the 12th and 13th field.
    fields = proc_text(f"{process}/stat").rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:13])) if len(fields) > 12 else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _gpu_memory() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free
