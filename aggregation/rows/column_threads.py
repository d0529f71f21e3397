"""Splits the columns of a block over threads.

Each thread runs its own range from beginning to end. Letting every small tensor operation start threads of
its own is several times slower as soon as another process wants the same cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_LEAST = 1 << 17


def in_ranges(work: Callable[[int, int], object], columns: int, step: int) -> None:
    """Calls `work(start, stop)` on ranges that cover `columns`, each but the last a multiple of `step`.

    As many ranges as torch has threads, fewer where a range would be too small to be worth a thread.
    """
    parts = max(1, min(torch.get_num_threads(), columns // _LEAST))
    width = -(-columns // (parts * step)) * step if parts > 1 else columns
    if width >= columns:
        work(0, columns)
        return
    starts = range(0, columns, width)
    list(_pool(parts).map(work, starts, (min(start + width, columns) for start in starts)))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="aggregation")
