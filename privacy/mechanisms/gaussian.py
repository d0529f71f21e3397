"""Normal draws in float64 from uniform words, and values and noise added up on a grid.

Compiled for this processor where there is a compiler (`gaussian.cpp`, in a quarter of the time), in NumPy and
torch elsewhere: the same draws from the same words, to within rounding.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roundtable.core.native_build import load_kernels
from roundtable.privacy.mechanisms.noise import NoiseSource

BLOCK = 1 << 14
"""Draws at a time: words and draws stay in a core's cache. Even, so that blocks do not change the draws."""

_SOURCE = Path(__file__).with_name("gaussian.cpp")
_TWO_PI = 2.0 * math.pi


def standard_normal(source: NoiseSource, count: int) -> Tensor:
    """`count` standard normal draws in float64, by Box–Muller on 53-bit uniforms.

    The largest magnitude is √(2·53·ln 2) = 8.57; a true normal passes it with probability 1e-17.
    """
    out = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, BLOCK):
        part = out[start : start + BLOCK]
        part.copy_(block_of_normals(source, part.numel()))
    return out


def block_of_normals(source: NoiseSource, count: int) -> Tensor:
    """The same in the memory of the words themselves, for at most a few blocks."""
    pairs = (count + 1) // 2
    words = source.words(2 * pairs)
    library = _library()
    if library is not None:
        library.normal_pairs(words.ctypes.data, words.ctypes.data, pairs)
        return torch.from_numpy(words.view(np.float64))[:count]
    return _box_muller(words)[:count]


def sum_on_grid(
    values: Tensor, normal: Tensor, out: Tensor, per_step: float, steps: float, unit: float
) -> None:
    """Writes (values · per_step + normal · steps), rounded, times `unit` into `out`; may overwrite `normal`.

    All are flat and of one length, `normal` in float64, `out` like `values` and perhaps the same.
    """
    library = _library()
    kind = str(values.dtype).removeprefix("torch.")
    plain = values.device.type == "cpu" and values.is_contiguous() and out.is_contiguous()
    if library is not None and plain and out.dtype == values.dtype and kind in ("float32", "float64"):
        function = getattr(library, f"on_grid_{kind}")
        count = values.numel()
        function(values.data_ptr(), normal.data_ptr(), out.data_ptr(), count, per_step, steps, unit)
    else:
        normal = normal.to(values.device)
        torch.mul(normal.mul_(steps).add_(values, alpha=per_step).round_(), unit, out=out)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_kernels(_SOURCE)
    if library is not None:
        address, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        library.normal_pairs.argtypes = [address, address, whole]
        for function in (library.on_grid_float32, library.on_grid_float64):
            function.argtypes = [address, address, address, whole, real, real, real]
            function.restype = None
        library.normal_pairs.restype = None
    return library


def _box_muller(words: NDArray[np.uint64]) -> Tensor:
    """Two words each give two draws: the first the radius, the second the angle."""
    words >>= np.uint64(11)
    radius, angle = words[0::2].astype(np.float64), torch.from_numpy(words[1::2].astype(np.float64))
    radius += 1.0
    radius *= 2.0**-53
    # NumPy's logarithm and root take half the time of torch's, its sine and cosine four times as long.
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle.mul_(_TWO_PI * 2.0**-53)
    draws = np.empty((len(radius), 2))
    np.multiply(radius, angle.cos().numpy(), out=draws[:, 0])
    np.multiply(radius, angle.sin_().numpy(), out=draws[:, 1])
    return torch.from_numpy(draws).flatten()
