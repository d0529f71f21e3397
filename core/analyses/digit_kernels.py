"""Digits of whole numbers and floats of doubles: compiled where there is a compiler, else in NumPy.

Digits lie one plane after the other: first the lowest digit of every number, then the next one of each.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from roundtable.core.native_build import load_kernels

_Doubles = npt.NDArray[np.float64]
_Singles = npt.NDArray[np.float32]
_SOURCE = Path(__file__).with_name("digits.cpp")
FLOATS = 3
"""Floats of a double."""


def cut_digits(numbers: npt.NDArray[np.int64], bits: int, out: _Singles) -> None:
    """The digits of numbers [count] from 0 on, into `out` [digits, count]."""
    for place, plane in enumerate(out):
        plane[:] = numbers >> place * bits & (1 << bits) - 1


def join_digits(mean: _Singles, bits: int, silos: int, offset: int) -> _Doubles | None:
    """Of the mean [digits, count] of silos' digits the sums of their numbers, each larger by `offset` in all.
    None where no digits of so many silos have such a mean."""
    digits, count = mean.shape
    library = _library()
    if library is not None and mean.flags.c_contiguous:
        out = np.empty(count)
        whole = (ctypes.c_int64(number) for number in (count, digits, bits, silos, offset))
        return None if library.join_digits(address(mean), *whole, address(out)) else out
    numbers = np.full(count, -offset, dtype=np.int64)
    for place, plane in enumerate(mean):
        scaled = plane.astype(np.float64) * silos
        totals = np.rint(scaled)
        right = (np.abs(scaled - totals) <= 0.5) & (totals >= 0) & (totals <= silos * ((1 << bits) - 1))
        if not right.all():
            return None
        numbers += totals.astype(np.int64) << place * bits
    return numbers.astype(np.float64)


def part_doubles(values: _Doubles, out: _Singles) -> bool:
    """_Doubles [count] as three floats each whose sum they are, into `out` [3, count], whose rows may lie
    apart. False where one of them is not finite, or beyond floats."""
    flat = np.ascontiguousarray(values).reshape(-1)
    library = _library()
    if library is not None and out.strides[1] == out.itemsize:
        stride = ctypes.c_int64(out.strides[0] // out.itemsize)
        return not library.part_doubles(
            address(flat), ctypes.c_int64(flat.size), stride, address(out, whole=False)
        )
    rest = flat
    with np.errstate(over="ignore", invalid="ignore"):
        for part in out:
            part[:] = rest
            rest = rest - part.astype(np.float64)
    return bool(np.isfinite(out[0]).all())


def whole_doubles(parts: _Singles) -> _Doubles:
    """The doubles [count] whose three floats these are, [3, count], whose rows may lie apart."""
    library = _library()
    if library is not None and parts.strides[1] == parts.itemsize:
        out = np.empty(parts.shape[1])
        stride = ctypes.c_int64(parts.strides[0] // parts.itemsize)
        library.whole_doubles(address(parts, whole=False), ctypes.c_int64(out.size), stride, address(out))
        return out
    first, second, third = parts.astype(np.float64)
    found: _Doubles = first + (second + third)
    return found


def address(array: npt.NDArray[Any], *, whole: bool = True) -> ctypes.c_void_p:
    """Where an array lies, which has to be of one piece unless its rows are told apart."""
    assert array.flags.c_contiguous or not whole
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_kernels(_SOURCE, fused=False)
    if library is not None:
        library.join_digits.restype = library.part_doubles.restype = ctypes.c_int64
    return library
