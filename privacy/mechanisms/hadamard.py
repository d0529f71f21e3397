"""The orthonormal Walsh–Hadamard transform, in place and fast: d log₂ d sums and differences.

Compiled for this processor where there is a compiler (`hadamard.cpp`), by torch elsewhere: the same bits,
since both add the same pairs in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from roundtable.core.native_build import load_kernels

_SOURCE = Path(__file__).with_name("hadamard.cpp")
_PIECE = 1 << 16


def transform(vector: Tensor) -> Tensor:
    """H x / √n in place, for a contiguous float32 CPU vector whose length n is a power of two; returns it.

    H[i, j] = (−1)^popcount(i & j). It is symmetric and its own inverse.
    """
    length = vector.numel()
    scale = 1.0 / math.sqrt(length)
    library = _library()
    if library is not None:
        library.hadamard(vector.data_ptr(), length, scale)
        return vector
    for piece in torch.split(vector, _PIECE):
        _stages(piece, 1)
    _stages(vector, _PIECE)
    return vector.mul_(scale)


def _stages(vector: Tensor, half: int) -> None:
    """All stages from the one whose partners are `half` apart."""
    while half < vector.numel():
        pairs = vector.view(-1, 2, half)
        first, second = pairs[:, 0], pairs[:, 1]
        difference = first - second
        first.add_(second)
        second.copy_(difference)
        half *= 2


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_kernels(_SOURCE)
    if library is not None:
        library.hadamard.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]
        library.hadamard.restype = None
    return library
