"""Measures how much of a step collectives take, on one early step under torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# The first steps fill caches; later ones are alike, and a profiler that stays costs each of them.
_SAMPLED = 3
_NAMES = ("gloo:", "ncclDevKernel", "ncclKernel")


class CollectiveSampler:
    """`share` is the part of the sampled step with a collective under way, overlapped or not.

    None before that step, and for good where a profiler of the user's runs then, of which there can be one
    only, or where it recorded nothing.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True) -> None:
        self.share: float | None = None
        self._device = device
        self._wanted = wanted
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps one step, and measures it where it is the one to sample."""
        self._steps += 1
        if not self._wanted or self._steps != _SAMPLED or torch._C._autograd._profiler_enabled():
            yield
            return
        cuda = self._device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
            began = time.perf_counter()
            yield
            if cuda:
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - began
        if (taken := seconds_in_collectives(profiled)) is not None:
            self.share = min(1.0, taken / max(seconds, 1e-9))


def seconds_in_collectives(profiled: profile) -> float | None:
    """Seconds in which at least one collective was under way; None where nothing at all was recorded, as on a
    GPU whose counters this user may not read.
    """
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    events = list(results.events())
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith(_NAMES)
    ]
    return covered(spans) / 1e9 if events else None


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total
