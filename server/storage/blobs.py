"""Writing one blob: hash and file together, disk write-back begun early, synced before it is named."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import ResourceError, StorageError, TransferError
from roundtable.core.machine.file_access import PLAIN_READ, read_at, set_direct, start_write_back

WRITE_BACK_BYTES = 16 << 20
READ_BYTES = 1 << 20
"""What is read at once to be hashed: less than what is mapped anew for each read (`core/allocator.py`)."""
DIRECT_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
CATCH_UP = 4
"""Bytes of what was there before that are hashed beside each byte that arrives."""
_ALIGNMENT = 4096


def os_error(error: OSError, path: Path) -> ResourceError | StorageError:
    """A failed file operation as an error with advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk of {path.parent} is full: free some space; nothing half written is used"
        )
    return StorageError(f"{path} cannot be written or read: {error.strerror}; check the disk")


class BlobWriter:
    """Appends to a partial file, hashing as it goes; `finish` makes a blob of it.

    An existing partial file is gone on with, from byte `offset` if that is given; those after it are dropped.
    The bytes before are hashed and shown to `observe` first, beside those that arrive, so that nobody waits
    until gigabytes are read again. With `direct` the bytes go to the disk past the system's cache where the
    file system allows it: an update has to be durable anyway and is read once, and pages of the cache cost
    more time than all the rest of taking it in.
    Raises ResourceError where the disk is full, StorageError for other disk errors.
    """

    def __init__(
        self,
        partial: Path,
        size: int | None,
        digest: str | None,
        adopt: Callable[[Path, str], None],
        observe: Callable[[bytes | memoryview], None] | None = None,
        offset: int | None = None,
        direct: bool = False,
    ) -> None:
        self.path = partial
        self._size = size
        self._digest = digest
        self._adopt = adopt
        self._observe = observe
        self._from = offset
        self._direct = direct
        self._file = -1
        self._hash = blake3()
        self._hashed = 0
        self._reading = -1
        self.offset = 0
        self._write_back_from = 0

    def open(self) -> BlobWriter:
        """Opens the file and goes on behind what is there; `close` belongs to it."""
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            self._go_on(self._from)
            self._direct = self._direct and set_direct(self._file, True)
        except OSError as error:
            raise os_error(error, self.path) from error
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Appends data, hashing it."""
        try:
            view = memoryview(data)
            if self._direct:
                view = self._write_direct(view)
            rest = view
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise os_error(error, self.path) from error
        self._absorb(view)
        self._catch_up(CATCH_UP * len(data))
        if not self._direct and self.offset - self._write_back_from >= WRITE_BACK_BYTES:
            start_write_back(self._file, self._write_back_from, self.offset - self._write_back_from)
            self._write_back_from = self.offset

    def append(self, data: bytes | memoryview) -> None:
        """Appends a large block, in pieces that are hashed while they are in the cache, and go to the disk
        meanwhile."""
        whole = memoryview(data)
        for start in range(0, len(whole), PIECE_BYTES):
            self.write(whole[start : start + PIECE_BYTES])

    def check(self) -> str:
        """The digest of what has arrived. TransferError if that is not what was announced: then it is
        forgotten, so that the next attempt begins anew. Reads what was there before and is not hashed yet."""
        self._catch_up(self.offset)
        digest = self._hash.hexdigest()
        if self._digest is not None and digest != self._digest:
            self.forget()
            raise TransferError(f"the bytes have the digest {digest}, announced was {self._digest}")
        return digest

    def finish(self) -> tuple[str, int]:
        """Checks the hash, syncs, gives the blob its name and closes the file: (digest, size)."""
        digest = self.check()
        try:
            os.fsync(self._file)
            self._adopt(self.path, digest)
        except OSError as error:
            raise os_error(error, self.path) from error
        # Not left to who waits for this thread: on a busy disk it takes milliseconds.
        self.close()
        return digest, self.offset

    def forget(self) -> None:
        """Deletes what has arrived."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file; what has arrived stays."""
        for file in (self._file, self._reading):
            if file >= 0:
                os.close(file)
        self._file = self._reading = -1

    def _write_direct(self, view: memoryview) -> memoryview:
        """Takes whole blocks past the cache; what it returns, and all that follows, goes the cached way."""
        while len(view) >= _ALIGNMENT and self.offset % _ALIGNMENT == 0:
            count = min(len(view), DIRECT_BYTES) // _ALIGNMENT * _ALIGNMENT
            block = _aligned_buffer()[:count]
            block[:] = view[:count]
            try:
                written = os.write(self._file, block)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            self._absorb(block[:written])
            view = view[written:]
        if view:
            self._direct = False
            self._write_back_from = self.offset
            set_direct(self._file, False)
        return view

    def _go_on(self, offset: int | None) -> None:
        length = os.fstat(self._file).st_size
        keep = length if offset is None else min(offset, length)
        if self._size is not None and keep > self._size:
            keep = 0
        if keep < length:
            os.ftruncate(self._file, keep)
        self._write_back_from = self.offset = os.lseek(self._file, keep, os.SEEK_SET)

    def _absorb(self, data: bytes | memoryview) -> None:
        if self._hashed == self.offset:
            self._take(data)
        self.offset += len(data)

    def _take(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        if self._observe is not None:
            self._observe(data)
        self._hashed += len(data)

    def _catch_up(self, most: int) -> None:
        """Hashes at most so many of the bytes in the file that are not hashed yet."""
        stop = min(self.offset, self._hashed + most)
        try:
            while self._hashed < stop:
                # Not by the descriptor that writes: past the cache it reads whole blocks alone.
                if self._reading < 0:
                    self._reading = os.open(self.path, PLAIN_READ)
                data = read_at(self._reading, min(READ_BYTES, stop - self._hashed), self._hashed)
                if not data:
                    raise StorageError(f"{self.path} was cut short while it was written: check the disk")
                self._take(data)
        except OSError as error:
            raise os_error(error, self.path) from error


_buffers = threading.local()


def _aligned_buffer() -> memoryview:
    """This thread's memory for direct writes, which begin at a page."""
    if not hasattr(_buffers, "block"):
        _buffers.block = memoryview(mmap.mmap(-1, DIRECT_BYTES))
    block: memoryview = _buffers.block
    return block
