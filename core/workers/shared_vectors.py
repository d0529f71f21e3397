"""Vectors that several processes see: anonymous memory, gone with the last process that maps it."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import torch

IN_MEMORY = 1 << 30
"""Above so many bytes a mapped file on disk is used instead, which the system may write out."""


class SharedFloats:
    """A float32 tensor [rows, columns] in memory that another process maps by its file descriptor."""

    def __init__(self, fd: int, rows: int, columns: int) -> None:
        self.fd = fd
        self.rows = rows
        self.columns = columns
        # Without elements there is nothing to map, and mmap refuses to.
        if rows * columns == 0:
            self.tensor = torch.empty(rows, columns)
            return
        mapping = mmap.mmap(fd, 4 * rows * columns)
        self.tensor = torch.from_numpy(np.frombuffer(mapping, dtype=np.float32)).view(rows, columns)

    @classmethod
    def create(cls, rows: int, columns: int) -> SharedFloats:
        """New memory, all zeros; MemoryError or OSError where there is not enough."""
        return cls(anonymous_memory(4 * rows * columns), rows, columns)

    def close(self) -> None:
        """Gives the descriptor back, once; the memory goes when no tensor refers to it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def share_bytes(data: bytes) -> int:
    """The descriptor of memory that holds them, for processes that inherit it; MemoryError or OSError."""
    fd = anonymous_memory(len(data))
    with mmap.mmap(fd, len(data)) as mapping:
        mapping[:] = data
    return fd


def shared_bytes(fd: int) -> bytes:
    """What `share_bytes` put there. Gives the descriptor back."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapping:
        os.close(fd)
        return mapping[:]


def anonymous_memory(size: int) -> int:
    """The descriptor of so many bytes without a name; MemoryError or OSError where there are not enough."""
    if size <= IN_MEMORY and hasattr(os, "memfd_create"):
        fd = os.memfd_create("roundtable")
    else:
        with tempfile.TemporaryFile(prefix="roundtable-") as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
