"""Writes files that are whole or absent: beside their place, synced, then renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import ResourceError
from roundtable.core.machine.file_access import sync_file, sync_folder

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Writes `path` anew and returns (BLAKE3, bytes); removed again if that fails.

    Raises ResourceError where the disk is full.
    """
    digest, size = blake3(), 0
    try:
        with path.open("wb") as file:
            for block in blocks:
                digest.update(block)
                size += file.write(block)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise explained(error, path) from error
    return digest.hexdigest(), size


def sync(path: Path) -> None:
    """Waits until what was written to the file is safe from a power cut."""
    try:
        sync_folder(path) if path.is_dir() else sync_file(path)
    except OSError as error:
        raise explained(error, path) from error


def replace_synced(path: Path, blocks: Iterable[bytes | memoryview], *, many: bool = False) -> None:
    """Replaces `path`, so that it holds the old bytes or all of the new ones, also after a power cut.

    `many`: other processes may replace it at the same time, and the last one's bytes stay.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial" if many else f".{path.name}.partial")
    write_file(partial, blocks)
    sync(partial)
    try:
        partial.replace(path)
    except OSError as error:
        raise explained(error, path) from error
    sync(path.parent)


def append_synced(path: Path, line: bytes) -> None:
    """Adds a line to the file, which may be new; it is safe from a power cut when this returns.

    Raises ResourceError where it could not be written; then the file ends where it ended before.
    """
    new = not path.exists()
    try:
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, end)
                raise
    except OSError as error:
        raise explained(error, path) from error
    if new:
        sync(path.parent)


def digest_of(path: Path) -> str:
    """The BLAKE3 of a file, in hexadecimal."""
    return blake3().update_mmap(path).hexdigest()


def explained(error: OSError, path: Path) -> ResourceError:
    """The same as an error of ours that says what to do; without the silo's path, as it may travel."""
    if error.errno in _FULL:
        return ResourceError(
            f"the silo's disk is full ({os.strerror(error.errno or 0)}): {path.name} could not be written; "
            "free some space in the agent's state folder"
        )
    return ResourceError(f"{path.name} could not be written at the silo: {error.strerror or error}")
