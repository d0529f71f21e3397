"""Files by descriptor, and names that outlive a power cut, also on systems that do not open folders."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

from roundtable.core.machine.optional_modules import FCNTL

PLAIN_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0)
"""How a file of bytes is opened: Windows would else change line ends."""
PLAIN_WRITE = os.O_WRONLY | getattr(os, "O_BINARY", 0)
_SYNC_FILE_RANGE_WRITE = 2
_POSITION = threading.Lock()


def modes_count() -> bool:
    """Whether a file's mode says who may read it; elsewhere its folder's access list does."""
    return hasattr(os, "getuid")


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where folders can be opened for that. Raises OSError."""
    if FCNTL is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Waits until what was written to a file is safe from a power cut. Raises OSError."""
    # Windows syncs only what is open for writing.
    descriptor = os.open(path, PLAIN_READ if FCNTL is not None else os.O_RDWR | PLAIN_READ)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(file: int, count: int, offset: int) -> bytes:
    """At most `count` bytes of an open file from byte `offset`, wherever others read it. Raises OSError."""
    if hasattr(os, "pread"):
        return os.pread(file, count, offset)
    with _POSITION:
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, count)


def read_into(file: int, view: memoryview, offset: int) -> int:
    """As `read_at`, into memory that is there; returns how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [view], offset)
    data = read_at(file, len(view), offset)
    view[: len(data)] = data
    return len(data)


def write_part(file: int, data: bytes | memoryview, offset: int) -> int:
    """Writes to an open file from byte `offset`; returns how many bytes went. Raises OSError."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    with _POSITION:
        os.lseek(file, offset, os.SEEK_SET)
        return os.write(file, data)


def take_room(path: Path, size: int) -> None:
    """Makes the file, new or not, one of so many bytes that all have their place on the disk: what is mapped
    and written there cannot lack it later, which would end the process. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        found = os.fstat(file)
        if size and (found.st_size < size or getattr(found, "st_blocks", 0) * 512 < size):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)
            else:
                os.truncate(file, size)
    finally:
        os.close(file)


def set_direct(file: int, direct: bool) -> bool:
    """Switches writing past the system's cache on or off; False where the file system has none."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or FCNTL is None:
        return False
    flags = FCNTL.fcntl(file, FCNTL.F_GETFL)
    try:
        FCNTL.fcntl(file, FCNTL.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError:
        return False
    return True


def _find_write_back() -> Callable[..., int] | None:
    """Linux's sync_file_range: without it the final sync has more to do, and nothing else changes."""
    try:
        return ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None


_write_back = _find_write_back()


def start_write_back(file: int, start: int, count: int) -> None:
    """Lets the system begin to write bytes to the disk, where it can be told so."""
    if _write_back is not None:
        _write_back(
            ctypes.c_int(file),
            ctypes.c_int64(start),
            ctypes.c_int64(count),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )
