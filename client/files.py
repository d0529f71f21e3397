"""Files that are whole or not there: written beside their place, synced, renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import ResourceError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_synced(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Writes `path` anew and returns (BLAKE3, bytes); removed again if that fails.

    Raises ResourceError where the disk is full.
    """
    digest, size = blake3(), 0
    try:
        with path.open("wb") as file:
            for block in blocks:
                digest.update(block)
                size += file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise explained(error, path) from error
    return digest.hexdigest(), size


def rename_synced(source: Path, target: Path) -> None:
    """Renames within a folder so that a power cut cannot undo it."""
    try:
        source.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
    except OSError as error:
        raise explained(error, target) from error
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_synced(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Both: `path` holds the old bytes or all of the new ones."""
    partial = path.with_name(f".{path.name}.partial")
    write_synced(partial, blocks)
    rename_synced(partial, path)


def digest_of(path: Path) -> str:
    """BLAKE3 of a file."""
    return blake3().update_mmap(path).hexdigest()


def explained(error: OSError, path: Path) -> ResourceError:
    """The same as an error of ours that says what to do; without the silo's path, as it may travel."""
    if error.errno in _FULL:
        return ResourceError(
            f"the silo's disk is full ({os.strerror(error.errno or 0)}): {path.name} could not be written; "
            "free some space in the agent's state folder"
        )
    return ResourceError(f"{path.name} could not be written at the silo: {error.strerror or error}")
