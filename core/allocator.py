"""Hints to the C library's allocator, which work nowhere else (musl, macOS) and are not needed there, and to
Python's collector of cycles."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MAPPED_FROM = 4 << 20
KEPT_FREE = 64 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_ARENAS = 2
_COLLECTED_AFTER = (10_000, 10, 10)
"""Objects of containers more than are freed, and collections of one generation before the next one's."""


def tune_for_transfers() -> None:
    """Keeps freed blocks of a transfer's size at hand, and maps larger ones one by one.

    By default glibc gives a freed chunk of 1 MiB back to the system and asks for it again at once, at
    the price of touching every page anew, and keeps for each thread the largest blocks it ever needed:
    two arenas are enough for threads that copy.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM)
        mallopt(_M_TRIM_THRESHOLD, KEPT_FREE)
        mallopt(_M_TOP_PAD, MAPPED_FROM)
        mallopt(_M_ARENA_MAX, _ARENAS)


def settle_imports() -> None:
    """Takes what was imported out of Python's search for cycles, and has it search less often.

    For a process that serves thousands: each full search reads all that lives, and holds everything up for
    tenths of a second. Call it once, before anything is made that ends before the process does.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED_AFTER)


@contextmanager
def importing() -> Iterator[None]:
    """Within it nothing searches for cycles; what was imported counts afterwards as what has lived for long.

    Imports make hundreds of thousands of objects that stay. Python would read them again and again as their
    number grows: a quarter of the time that torch and ours take. It does not read them now, either.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
