"""Which backend runs a job's clients, and why that one."""

from __future__ import annotations

import os

import torch

from roundtable.simulation.backend import Backend, World
from roundtable.simulation.processes import Processes
from roundtable.simulation.sequential import Sequential


def make_backend(world: World) -> tuple[Backend, str]:
    """The job's `simulation.backend`, and in words why it was taken.

    Raises ConfigError where what was asked for is impossible.
    """
    wanted = world.job.simulation.backend
    workers = world.job.simulation.workers or cores()
    if wanted == "sequential":
        return Sequential(world, device=_device()), "asked for"
    if wanted == "processes":
        return Processes(world, workers, device=_device()), "asked for"
    return _automatic(world, workers)


def _automatic(world: World, workers: int) -> tuple[Backend, str]:
    if workers == 1:
        return Sequential(world, device=_device()), "one worker"
    if world.reference is None:
        why = "other processes cannot make this task: it is an object of this one alone"
        return Sequential(world, device=_device()), why
    return Processes(world, workers, device=_device()), f"{workers} workers"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
