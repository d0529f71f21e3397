"""Shares of each batch by the speed of ranks: measured in a round, used in the next.

What is measured is the forward pass of micro-batches, in which ranks of DDP and ZeRO-1 do not wait for each
other. Weights of examples, not of ranks, make a step, so it is the same whatever the shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

# Speeds that differ by less are taken for equal; what a rank gets at least of an equal share, so that it goes
# on being measured; micro-batches at a round's start that are slow for reasons of their own.
_ALIKE, _LEAST, _WARM = 1.1, 0.1, 2
_MOST_EVENTS = 1000


class ForwardClock:
    """Times the forward passes of a round's micro-batches on this rank."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._passed = 0
        self._seconds = 0.0
        self._examples = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def over(self, examples: int) -> Iterator[None]:
        """Times the block, a forward pass of so many examples."""
        counts = self._passed >= _WARM and examples > 0 and len(self._events) < _MOST_EVENTS
        self._passed += 1
        if not counts:
            yield
            return
        self._examples += examples
        if self._device.type == "cuda":
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
            return
        began = self._clock()
        yield
        self._seconds += self._clock() - began

    def speed(self) -> float:
        """Examples a second; 0 where nothing was timed."""
        if self._events:
            torch.cuda.synchronize(self._device)
            self._seconds = sum(first.elapsed_time(last) for first, last in self._events) / 1000
        return self._examples / self._seconds if self._seconds else 0.0


def next_shares(
    clock: ForwardClock, group: dist.ProcessGroup, device: torch.device, before: tuple[float, ...] | None
) -> tuple[float, ...] | None:
    """The next round's shares, from the ranks' speed in this one; rank 0 says what changes. Collective."""
    own = torch.tensor([clock.speed()], dtype=torch.float64, device=device)
    speeds = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(speeds, own, group=group)
    found = shares_by_speed([float(each) for each in speeds], before)
    if found != before and dist.get_rank() == 0:
        told = "equal" if found is None else ", ".join(f"{share:.1%}" for share in found)
        print(f"ranks' shares of the next round's batches, by their speed: {told}", flush=True)
    return found


def shares_by_speed(speeds: Sequence[float], before: Sequence[float] | None) -> tuple[float, ...] | None:
    """Each rank's share of a batch, together 1; None for equal ones.

    Half of what was measured counts and half of the shares `before`; all of it at first. Where a rank was not
    measured everything stays.
    """
    if not all(speed > 0 for speed in speeds):
        return None if before is None else tuple(before)
    if max(speeds) <= _ALIKE * min(speeds):
        return None
    total, count = sum(speeds), len(speeds)
    found = [max(speed / total, _LEAST / count) for speed in speeds]
    if before is not None:
        found = [(new + old) / 2 for new, old in zip(found, before, strict=True)]
    return tuple(each / sum(found) for each in found)


def cut_by_shares(count: int, shares: Sequence[float]) -> list[int]:
    """How many of `count` examples each rank gets: together all, each within one of its share."""
    ends, reached = [], 0.0
    for share in shares:
        reached += share
        ends.append(round(count * reached / sum(shares)))
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
