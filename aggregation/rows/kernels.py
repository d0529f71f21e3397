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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from roundtable.aggregation.rows.matrix import SelectedRows, UpdateMatrix, accelerated
from roundtable.core.native_build import load_kernels

WORTH_COMPILING = 1 << 24
"""Values (rows × columns) from which the kernels are used: 20 updates of 840 000 parameters."""

_SOURCE = Path(__file__).with_name("kernels.cpp")


@dataclass(frozen=True)
class Kernels:
    """The functions of kernels.cpp, by name and element type; every call releases the interpreter lock.

    order: the rows of a block that are meant (int64), where they are not all of them as they lie there.
    """

    library: ctypes.CDLL
    order: np.ndarray | None = None

    def call(self, name: str, values: torch.Tensor, *arguments: int) -> int:
        """Runs `name` on a block [rows, columns] with contiguous rows; pointers are passed as integers."""
        function = getattr(self.library, f"{name}_{str(values.dtype).removeprefix('torch.')}")
        rows, order = len(values), 0
        if self.order is not None:
            rows, order = len(self.order), self.order.ctypes.data
        numbers = (values.data_ptr(), values.stride(0), order, rows, values.shape[1], *arguments)
        return int(function(*(ctypes.c_int64(number) for number in numbers)))


def blocks_with_kernels(
    matrix: UpdateMatrix, size: int
) -> Iterator[tuple[int, int, torch.Tensor, Kernels | None]]:
    """The blocks of a matrix, each with the kernels to use on it, where a matrix of `size` values should.

    Kernels take chosen rows from where they lie; for others they are copied, as `blocks` does.
    """
    if type(matrix) is not SelectedRows:
        for start, stop, values in matrix.blocks():
            yield start, stop, values, kernels_for(values, size)
        return
    base, order = lying_in(matrix)
    chosen = SelectedRows(base, order.tolist())
    for start, stop, values in base.blocks():
        kernels = kernels_for(values, size)
        if kernels is not None:
            yield start, stop, values, replace(kernels, order=order)
            continue
        for left, right, copied in chosen.copies(start, values):
            yield left, right, copied, None


def lying_in(matrix: SelectedRows) -> tuple[UpdateMatrix, np.ndarray]:
    """The matrix in which the rows lie, and which of its rows they are, int64."""
    order = np.array(matrix.indices, dtype=np.int64)
    if type(matrix.base) is not SelectedRows:
        return matrix.base, order
    base, lying = lying_in(matrix.base)
    return base, lying[order]


def kernels_for(values: torch.Tensor, size: int) -> Kernels | None:
    """The kernels to use on a block of a matrix of `size` values, if any."""
    usable = values.dtype in (torch.float32, torch.float64) and values.stride(-1) == 1
    if size < WORTH_COMPILING or not usable or accelerated(values.device):
        return None
    return load()


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled if need be; None without a compiler or with ROUNDTABLE_KERNELS=off."""
    library = load_kernels(_SOURCE)
    return None if library is None else Kernels(library)
