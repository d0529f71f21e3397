"""Loads the compiled column kernels, and says when they are worth it.

One C++ file serves every number of rows: a sorting network is data to it, not code. So a machine compiles
once, in one or two seconds, and keeps the result in the user's cache folder; torch.compile would compile
anew for each number of clients and take longer each time. Nothing is compiled for matrices of fewer than
`WORTH_COMPILING` values, and whether a matrix goes through the kernels depends on its size alone, so a run
gives the same result whether or not the cache was warm. Without a C++ compiler, with
ROUNDTABLE_KERNELS=off and for small matrices the same algorithms run in NumPy, on CUDA in torch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from roundtable.core.compiled import load_kernels

WORTH_COMPILING = 1 << 24
"""Values (rows × columns) from which the kernels are used: 20 updates of 840 000 parameters."""

_SOURCE = Path(__file__).with_name("kernels.cpp")


class Kernels:
    """The functions of kernels.cpp, by name and element type; every call releases the interpreter lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, values: torch.Tensor, *arguments: int) -> int:
        """Runs `name` on a block [rows, columns] with contiguous rows; pointers are passed as integers."""
        function = getattr(self._library, f"{name}_{str(values.dtype).removeprefix('torch.')}")
        rows, columns = values.shape
        numbers = (values.data_ptr(), values.stride(0), rows, columns, *arguments)
        return int(function(*(ctypes.c_int64(number) for number in numbers)))


def kernels_for(values: torch.Tensor, size: int) -> Kernels | None:
    """The kernels, where a matrix of `size` values that yields blocks like `values` should use them."""
    usable = values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)
    if size < WORTH_COMPILING or not usable or values.stride(-1) != 1:
        return None
    return load()


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled if need be; None without a compiler or with ROUNDTABLE_KERNELS=off."""
    library = load_kernels(_SOURCE)
    return None if library is None else Kernels(library)
