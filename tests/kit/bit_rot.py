"""A bit of a file flips, and no time stamp shows it."""

from __future__ import annotations

import os
from pathlib import Path


def flip(path: Path, place: int) -> None:
    """Flips a bit at this byte, from the end if it is negative, and leaves the file's time as it was."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 4]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
