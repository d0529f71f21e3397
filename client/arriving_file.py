"""A file that is read while it is being downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Condition

from roundtable.core.errors import EncodingError
from roundtable.core.machine.file_access import PLAIN_READ, read_at


class ArrivingFile:
    """Bytes of a file of `size` bytes in order, as a source to decode: whoever reads waits for what has not
    come.

    One thread reads; another one says what is there. What is read has not been verified yet.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._read = 0
        self._here = 0
        self._given_up = False
        self._file = -1
        self._news = Condition()

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return self._size - self._read

    def has(self, count: int) -> None:
        """The file's first `count` bytes are written; it may be renamed afterwards."""
        with self._news:
            if self._file < 0:
                self._file = os.open(self._path, PLAIN_READ)
            self._here = count
            self._news.notify()

    def give_up(self) -> None:
        """No more will come: who waits for it gets EncodingError."""
        with self._news:
            self._given_up = True
            self._news.notify()

    def read(self, count: int) -> memoryview:
        """The next bytes; EncodingError where there will be fewer."""
        self._wait_for(count)
        data = read_at(self._file, count, self._read) if count else b""
        self._read += count
        if len(data) != count:
            raise EncodingError(f"{self._path.name} was cut short while it was read")
        return memoryview(data)

    def skip(self, count: int) -> None:
        """Passes over bytes; EncodingError where there will be fewer."""
        self._wait_for(count)
        self._read += count

    def close(self) -> None:
        """Lets go of the file, once nobody reads any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _wait_for(self, count: int) -> None:
        if count > self.left:
            raise EncodingError(f"{self._path.name} ends {count - self.left} bytes too early")
        with self._news:
            self._news.wait_for(lambda: self._given_up or self._here >= self._read + count)
            if self._here < self._read + count:
                raise EncodingError(f"{self._path.name} did not arrive")
