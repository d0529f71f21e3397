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
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

WORTH_COMPILING = 1 << 24
"""Values (rows × columns) from which the kernels are used: 20 updates of 840 000 parameters."""

_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
_SOURCE = Path(__file__).with_name("kernels.cpp")
_log = logging.getLogger(__name__)


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
    if os.environ.get("ROUNDTABLE_KERNELS", "").lower() in ("off", "0"):
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None or not _SOURCE.is_file():
        _log.info("no C++ compiler found: aggregation runs in plain NumPy, which is slower on large models")
        return None
    try:
        return Kernels(ctypes.CDLL(str(_compiled(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the aggregation kernels could not be compiled, plain NumPy is used instead: %s", error)
        return None


def _compiled(compiler: str) -> Path:
    """The shared library of this source, compiler and processor, built into the cache where it is missing."""
    recipe = [compiler, *_FLAGS, platform.machine(), _processor()]
    name = hashlib.blake2b(_SOURCE.read_bytes() + "\0".join(recipe).encode(), digest_size=16).hexdigest()
    folder = _cache_folder()
    target = folder / f"kernels-{name}.so"
    if not target.is_file():
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [compiler, *_FLAGS, "-o", temporary, str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return target


def _cache_folder() -> Path:
    """A folder that only this user can write to: what lies in it is loaded into the process."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "roundtable" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user and be writable by nobody else")
    return folder


def _processor() -> str:
    """What -march=native looks at: machines that share a home folder each get a library of their own."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
