"""Loads the compiled kernels of the encodings; without a compiler torch does the same, with the same bits."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from roundtable.core.native_build import load_kernels

_SOURCE = Path(__file__).with_name("kernels.cpp")


@dataclass(frozen=True)
class EncodingKernels:
    """The functions of kernels.cpp by name; every call releases the interpreter lock."""

    library: ctypes.CDLL

    def call(self, name: str, *arguments: torch.Tensor | np.ndarray | int | memoryview) -> int:
        """Runs `name`; arrays and tensors, which must be contiguous, are passed as addresses."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_int64
        return int(function(*(ctypes.c_uint64(_word(argument)) for argument in arguments)))


def _word(argument: torch.Tensor | np.ndarray | int | memoryview) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    if isinstance(argument, memoryview):
        return np.frombuffer(argument, dtype=np.uint8).ctypes.data
    return int(argument) & (1 << 64) - 1


@functools.cache
def load() -> EncodingKernels | None:
    """The kernels, compiled if need be; None without a compiler or with ROUNDTABLE_KERNELS=off."""
    library = load_kernels(_SOURCE, sorted(_SOURCE.parent.glob("*.h")), fused=False)
    return None if library is None else EncodingKernels(library)
