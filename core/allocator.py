"""Hints to the C library's allocator; where it does not take them (musl, macOS) everything works as well."""

from __future__ import annotations

import ctypes
import sys

MAPPED_FROM = 4 << 20
KEPT_FREE = 64 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_ARENAS = 2


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
