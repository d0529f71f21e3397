"""What is known to be whole on the disk, kept over restarts: large files need not be hashed anew for it.

A line for each file names its digest and what the file system says of it (time of the last write, size,
inode) when its hash was right; of lines with the same digest the last counts. A file that was written to,
replaced or copied since looks otherwise, and is hashed anew. What a disk gives back without a write shows to
those who read: they hash what they read, whether a line is here or not.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock

log = logging.getLogger("roundtable.server.storage.verified_files")

WORTH_KEEPING = 4 << 20
"""Bytes of a file from which a line is worth more than hashing it again."""
_SPARE_LINES = 1000

Stamp = tuple[int, ...]


def stamp_of(path: Path) -> Stamp | None:
    """A value that changes with every write to the file; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class VerifiedFiles:
    """The files of one folder whose hash was right, in memory, and in the file `path` if they are large.

    The file is a help alone: where it cannot be read or written, files are hashed once after each start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamps: dict[str, Stamp] = {}
        self._lines = 0
        self._lock = Lock()

    def load(self) -> None:
        """Reads what was kept by an earlier process; half a line, as a crash leaves it, is passed over."""
        try:
            lines = self._path.read_text(encoding="ascii").split("\n")
        except (OSError, UnicodeDecodeError):
            return
        self._lines = len(lines)
        for line in lines[:-1]:
            digest, *numbers = line.split(" ")
            if not numbers:
                self._stamps.pop(digest, None)
            elif len(numbers) == 3 and all(each.isdecimal() and len(each) < 20 for each in numbers):
                self._stamps[digest] = tuple(map(int, numbers))

    def known(self, digest: str, path: Path) -> bool:
        """Whether the file is as it was when its hash was right."""
        stamp = stamp_of(path)
        return stamp is not None and self._stamps.get(digest) == stamp

    def note(self, digest: str, path: Path) -> None:
        """The file's hash is right."""
        stamp = stamp_of(path)
        if stamp is None:
            return
        with self._lock:
            self._stamps[digest] = stamp
            if stamp[1] >= WORTH_KEEPING:
                self._append(" ".join(map(str, (digest, *stamp))))

    def forget(self, digest: str) -> None:
        """The file is deleted, or has to be looked at again."""
        with self._lock:
            stamp = self._stamps.pop(digest, None)
            if stamp is not None and stamp[1] >= WORTH_KEEPING:
                self._append(digest)

    def _append(self, line: str) -> None:
        try:
            if self._lines > 2 * len(self._stamps) + _SPARE_LINES:
                kept = [
                    (digest, *stamp) for digest, stamp in self._stamps.items() if stamp[1] >= WORTH_KEEPING
                ]
                text = "".join(" ".join(map(str, entry)) + "\n" for entry in kept)
                partial = self._path.with_name(f"{self._path.name}.new")
                partial.write_text(text, encoding="ascii")
                partial.replace(self._path)
                self._lines = len(kept)
                return
            with self._path.open("a", encoding="ascii") as file:
                file.write(f"{line}\n")
            self._lines += 1
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)
