"""What one attempt of secure aggregation has heard and done, line by line, so that it can be done again.

Each line carries a hash over itself and the line before: an attempt is done again as it was, or not at all.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import StorageError
from roundtable.core.machine.file_access import sync_folder
from roundtable.server.storage.blobs import os_error


class Journal:
    """An append-only file. What is `add`ed is safe from a crash of the machine after `sync`.

    StorageError for one that is damaged; a last line that was cut off by a crash counts as never written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.entries = self._read(path) if path.exists() else []
            self._file = path.open("ab", buffering=0)
            sync_folder(path.parent)
        except OSError as error:
            raise os_error(error, path) from error

    def add(self, kind: str, data: bytes) -> None:
        """Appends an entry, unless the journal is closed. ResourceError if the disk is full."""
        if self._file.closed:
            return
        found = _chained(self._hash, kind, data)
        line = json.dumps([kind, base64.b64encode(data).decode(), found]).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # Half a line would spoil the one that follows, once there is room again.
            self._file.truncate(end)
            raise os_error(error, self.path) from error
        self._hash = found

    def sync(self) -> None:
        """Waits until everything is on the disk."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise os_error(error, self.path) from error

    def close(self, *, forget: bool) -> None:
        """Closes the file; with `forget` deletes it."""
        self._file.close()
        if forget:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> list[tuple[str, bytes]]:
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        # Nothing followed from a line that was cut off, or it would have been synced.
        os.truncate(path, end)
        entries = []
        for number, line in enumerate(whole[:end].splitlines(), 1):
            try:
                kind, coded, found = json.loads(line)
                data = base64.b64decode(coded, validate=True)
                if found != (expected := _chained(self._hash, kind, data)):
                    raise ValueError(f"its hash is {expected[:12]}")
            except (ValueError, TypeError, RecursionError) as error:
                raise StorageError(f"the journal {path.name} is damaged in line {number}: {error}") from error
            entries.append((kind, data))
            self._hash = found
        return entries


def _chained(before: str, kind: str, data: bytes) -> str:
    """The hash of an entry that follows the one with the hash `before`."""
    return blake3(f"{before}\n{kind}\n".encode() + data).hexdigest()
