"""Keeping the process small: memory goes back to the system, and models are walked through in slices.

A coordinator works on one vector at a time and must not keep several of them. The calls into the C
library are hints; where they do not exist (musl, macOS) everything works and takes more memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from roundtable.aggregation import OptimizerState, ServerOptimizer

SLICE = 1 << 22


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


@dataclass(frozen=True)
class SlicedOptimizer:
    """A server optimizer applied slice by slice: the new model takes the aggregate's place in memory.

    For optimizers that work on each parameter by itself, so that the result is the same to the bit. The
    old model must be a mapped file: its pages are dropped as they are left behind.
    """

    inner: ServerOptimizer

    def init(self, columns: int) -> OptimizerState:
        return self.inner.init(columns)

    def apply(
        self, state: OptimizerState, model: Tensor, delta: Tensor, step: int
    ) -> tuple[OptimizerState, Tensor]:
        vectors = {name: torch.empty_like(vector) for name, vector in state.vectors.items()}
        scalars = state.scalars
        for start in range(0, max(1, model.numel()), SLICE):
            part = slice(start, start + SLICE)
            own = OptimizerState({name: v[part] for name, v in state.vectors.items()}, state.scalars)
            after, new = self.inner.apply(own, model[part], delta[part], step)
            delta[part] = new
            for name, vector in after.vectors.items():
                vectors[name][part] = vector
            scalars = after.scalars
            drop_pages(model[part])
        return OptimizerState(vectors, scalars), delta
