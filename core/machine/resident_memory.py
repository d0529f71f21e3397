"""Keeping the process small: memory that is not needed goes back to the system.

The calls into the C library are hints; where they do not exist (musl, macOS) everything works and takes
more memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor


def give_back_free_memory() -> None:
    """Returns memory that was freed in small blocks to the system; takes about a millisecond."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


def drop_pages(mapped: Tensor) -> None:
    """Lets the system drop the pages of a mapped, unchanged file; they can be read again."""
    if sys.platform == "linux" and mapped.numel():
        page = mmap.PAGESIZE
        start = -(-mapped.data_ptr() // page) * page
        stop = (mapped.data_ptr() + mapped.numel() * mapped.itemsize) // page * page
        if stop > start:
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_int(mmap.MADV_DONTNEED)
            )
