"""Compiles C++ kernels for this very processor, once on a machine, and keeps them in the user's cache folder.

Nothing depends on it: whoever asks for kernels has another way to do the same, for machines without a
compiler and for ROUNDTABLE_KERNELS=off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from roundtable.core.machine.file_locks import lock_file
from roundtable.core.machine.process_facts import processor_flags, user_id

_FLAGS = ("-march=native", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


def load_kernels(
    source: Path, headers: Sequence[Path] = (), level: str = "-O3", *, fused: bool = True
) -> ctypes.CDLL | None:
    """The library of a source file that includes `headers`, compiled if need be.

    `fused` lets the compiler round a product and a sum once, where the processor can: faster, with other last
    bits than on one that cannot.
    None where there can be none; why is logged, as a warning if it is an error.
    """
    if os.environ.get("ROUNDTABLE_KERNELS", "").lower() in ("off", "0"):
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    # Without users there is no folder of which nobody else could have written what is loaded.
    if user_id() is None or compiler is None or not source.is_file():
        _log.info("no C++ compiler found: %s is not compiled, what it does runs slower", source.name)
        return None
    how = (level, "-ffp-contract=fast") if fused else (level, "-ffp-contract=off", "-fno-trapping-math")
    try:
        return ctypes.CDLL(str(_compiled(compiler, source, headers, how)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s could not be compiled, what it does runs slower: %s", source.name, error)
        return None


def _compiled(compiler: str, source: Path, headers: Sequence[Path], how: Sequence[str]) -> Path:
    """The shared library of these files, compiler and processor, built into the cache where it is missing."""
    flags = (*how, *_FLAGS)
    recipe = [compiler, *flags, platform.machine(), _processor()]
    text = b"\0".join(path.read_bytes() for path in (source, *headers))
    name = hashlib.blake2b(text + "\0".join(recipe).encode(), digest_size=16).hexdigest()
    folder = _cache_folder()
    target = folder / f"kernels-{name}.so"
    if not target.is_file():
        lock = os.open(folder, os.O_RDONLY)
        try:
            # Processes that start together wait for one of them, instead of compiling the same beside it.
            lock_file(lock, wait=True)
            if not target.is_file():
                _compile([compiler, *flags], source, target)
        finally:
            os.close(lock)
    return target


def _compile(command: Sequence[str], source: Path, target: Path) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        subprocess.run([*command, "-o", temporary, str(source)], check=True, capture_output=True, timeout=120)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _cache_folder() -> Path:
    """A folder that only this user can write to: what lies in it is loaded into the process."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "roundtable" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != user_id() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user and be writable by nobody else")
    return folder


def _processor() -> str:
    """What -march=native looks at: machines that share a home folder each get a library of their own."""
    return processor_flags() or platform.processor()
