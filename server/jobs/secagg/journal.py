"""What one attempt of secure aggregation has heard and done, line by line, so that it can be done again."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

from roundtable.server.storage.blobs import os_error, sync_folder


class Journal:
    """An append-only file. What is `add`ed is safe from a crash of the machine after `sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[tuple[str, bytes]] = list(_read(path)) if path.exists() else []
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = path.open("a", encoding="ascii")
            # A line that was cut off by a crash stays cut off, and what follows begins a line of its own.
            self._file.write("\n")
            sync_folder(path.parent)
        except OSError as error:
            raise os_error(error, path) from error

    def add(self, kind: str, data: bytes) -> None:
        """Appends an entry, unless the journal is closed. ResourceError if the disk is full."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps([kind, base64.b64encode(data).decode()]) + "\n")
            self._file.flush()
        except OSError as error:
            raise os_error(error, self.path) from error

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


def _read(path: Path) -> Iterator[tuple[str, bytes]]:
    for line in path.read_text(encoding="ascii").splitlines():
        if not line:
            continue
        try:
            kind, data = json.loads(line)
            yield kind, base64.b64decode(data, validate=True)
        except ValueError:
            # Cut off in the middle: nothing followed from it, or it would have been synced.
            continue
