"""Locks on files that the system releases when the process ends, however it ends."""

from __future__ import annotations

import os
import time

from roundtable.core.machine.optional_modules import FCNTL, MSVCRT

_PLACE = 1 << 30
"""Windows locks bytes, which nobody can read then: one that no file of ours has."""
_PAUSE = 0.05


def lock_file(file: int, *, wait: bool = False, shared: bool = False) -> None:
    """Locks an open file, or on POSIX a folder, until its descriptor is closed.

    BlockingIOError while another process holds it, unless this may `wait`. `shared` locks go together; where
    the system has none, each is alone.
    """
    if FCNTL is not None:
        kind = FCNTL.LOCK_SH if shared else FCNTL.LOCK_EX
        FCNTL.flock(file, kind if wait else kind | FCNTL.LOCK_NB)
        return
    assert MSVCRT is not None
    here = os.lseek(file, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(file, _PLACE, os.SEEK_SET)
            try:
                MSVCRT.locking(file, MSVCRT.LK_NBLCK, 1)
            except OSError as error:
                if not wait:
                    raise BlockingIOError(error.errno, error.strerror) from error
                time.sleep(_PAUSE)
            else:
                return
    finally:
        os.lseek(file, here, os.SEEK_SET)
