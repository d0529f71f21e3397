"""Times what all ranks do together: the slowest rank's median."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

Clock = Callable[[], float]


def seconds_of(work: Callable[[], object], device: torch.device, clock: Clock, repeats: int = 7) -> float:
    """The median of the slowest rank, after one time that does not count. Collective."""
    work()
    found = []
    for _ in range(repeats):
        wait(device)
        began = clock()
        work()
        wait(device)
        found.append(clock() - began)
    seconds = torch.tensor(statistics.median(found), dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
