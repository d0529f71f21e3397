"""The compiled kernels that a recorded step's instructions run on, where this machine can compile them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundtable.core.native_build import load_kernels

_SOURCE = Path(__file__).with_name("kernels.cpp")


@dataclass(frozen=True)
class Library:
    """`run` and `repeat` of kernels.cpp perform instructions, `difference` ends a training; numbers of
    operations and maps by name."""

    run: Any
    repeat: Any
    difference: Any
    operations: dict[str, int]
    maps: dict[str, int]


@functools.cache
def load() -> Library | None:
    """None without a C++ compiler or with ROUNDTABLE_KERNELS=off; the first call on a machine compiles.

    With -O2, because -O3 takes longer and gains nothing where vectors are written out.
    """
    library = load_kernels(_SOURCE, sorted(_SOURCE.parent.glob("kernels_*.h")), "-O2")
    if library is None:
        return None
    library.difference.restype = ctypes.c_float
    functions = (library.run, library.repeat, library.difference)
    return Library(*functions, _names(library.operation_names), _names(library.map_names))


def _names(function: Any) -> dict[str, int]:
    function.restype = ctypes.c_char_p
    return {name: number for number, name in enumerate(function().decode().rstrip(",").split(","))}
