"""A place outside this machine, as fsspec names it: a bucket (`s3://…`), `sftp://…`, or a second disk.

Below its address a blob lies under `ab/abcdef…`, as in the coordinator's own folder. What is stored is read
back and compared by hash before it counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
from blake3 import blake3

from roundtable.core.errors import ConfigError, RoundtableError, StorageError
from roundtable.core.extras import missing
from roundtable.core.machine.file_access import sync_folder
from roundtable.server.storage.blobs import os_error

_log = logging.getLogger(__name__)
PIECE = 4 << 20
BLOCK = 16 << 20
PARTIAL = ".partial"


class Unreachable(StorageError):
    """A place does not answer, refuses, or returned other bytes than were stored; trying later may help."""


class Location:
    """One place outside this machine. Its methods block, and raise Unreachable where an operation fails."""

    def __init__(self, address: str, setting: str) -> None:
        self.address = address
        try:
            # Listings that fsspec remembers would hide what another coordinator has written.
            self._files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            known = missing(error, f"{setting} = {address!r}") if isinstance(error, ImportError) else None
            raise known or ConfigError(f"{setting}: {address!r} cannot be used: {error}") from error
        self._root = root.rstrip("/")
        if isinstance(self._files, fsspec.asyn.AsyncFileSystem) and not self._files.asynchronous:
            self._files.loop.call_soon_threadsafe(self._files.loop.set_exception_handler, _broken_off)
        # What renames is a file system, where a file can be half written; an object appears when it is whole.
        self._renames = type(self._files).mv is not fsspec.AbstractFileSystem.mv

    def has(self, name: str) -> bool:
        """Whether something is stored under this name."""
        with self._asking():
            return bool(self._files.exists(self._place(name)))

    def put(self, source: Path, digest: str) -> None:
        """Copies a blob, then reads it back."""
        with source.open("rb", buffering=0) as file:
            self._store(blob_name(digest), iter(lambda: file.read(PIECE), b""), digest)

    def get(self, digest: str, target: Path) -> bool:
        """Fetches a blob into a file, synced; False if it is not there, or damaged there."""
        hasher = blake3()
        opened = self._opened(blob_name(digest))
        if opened is None:
            return False
        try:
            with target.open("wb") as file:
                for data in self._pieces(opened):
                    hasher.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise os_error(error, target) from error
        if hasher.hexdigest() != digest:
            target.unlink()
            return False
        return True

    def write(self, name: str, data: bytes) -> None:
        """Stores something small under a name of its own."""
        self._store(name, [data], blake3(data).hexdigest())

    def read(self, name: str) -> bytes | None:
        """What `write` has stored; None if there is nothing."""
        opened = self._opened(name)
        return None if opened is None else b"".join(self._pieces(opened))

    def stream(self, name: str) -> Iterator[bytes] | None:
        """What is stored under a name, piece by piece; None if there is nothing."""
        opened = self._opened(name)
        return None if opened is None else self._pieces(opened)

    def forget(self, name: str) -> None:
        """Deletes what is stored under this name, if anything."""
        if self.has(name):
            with self._asking():
                self._files.rm_file(self._place(name))

    def probe(self) -> None:
        """Stores something, reads it back and deletes it."""
        name = f"probe-{secrets.token_hex(4)}"
        self.write(name, name.encode())
        self.forget(name)

    @property
    def folder(self) -> Path | None:
        """The folder, where the place is one of this machine."""
        return Path(self._root) if self._on_disk else None

    def contents(self) -> dict[str, int]:
        """Lists everything that is stored: name → size in bytes."""
        with self._asking():
            files = self._files.find(self._root, detail=True)
        start = len(self._root) + 1
        return {name[start:]: int(about["size"]) for name, about in files.items()}

    def _store(self, name: str, pieces: Iterable[bytes], digest: str) -> None:
        place = self._place(name)
        written = f"{place}.{secrets.token_hex(4)}{PARTIAL}" if self._renames else place
        with self._asking():
            self._write(written, pieces)
            stored = self._digest_of(written)
            if stored != digest:
                self._files.rm_file(written)
        if stored != digest:
            raise Unreachable(f"{name} came back from {self.address} with the digest {stored[:12]}")
        if self._renames:
            with self._asking():
                self._files.mv(written, place)
                if self._on_disk:
                    sync_folder(Path(place).parent)

    def _write(self, place: str, pieces: Iterable[bytes]) -> None:
        if self._renames:
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        with self._files.open(place, "wb", block_size=BLOCK) as file:
            for data in pieces:
                file.write(data)
            if self._on_disk:
                file.flush()
                os.fsync(file.fileno())

    def _digest_of(self, place: str) -> str:
        hasher = blake3()
        for data in self._pieces(self._files.open(place, "rb", block_size=BLOCK)):
            hasher.update(data)
        return hasher.hexdigest()

    def _opened(self, name: str) -> Any | None:
        with self._asking():
            try:
                return self._files.open(self._place(name), "rb", block_size=BLOCK)
            except FileNotFoundError:
                return None

    def _pieces(self, opened: Any) -> Iterator[bytes]:
        with opened:
            while True:
                with self._asking():
                    data: bytes = opened.read(PIECE)
                if not data:
                    return
                yield data

    @property
    def _on_disk(self) -> bool:
        return "file" in self._files.protocol

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RoundtableError:
            raise
        except Exception as error:
            # Each kind of place has a library of its own, and most raise errors that are no OSError.
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise Unreachable(
                f"{self.address} does not do what it is asked to: {reason}; "
                "check its address, its keys, and the network between"
            ) from error


def _broken_off(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs in a line what a library's own task meets whose request has failed beside it, with the reason."""
    if isinstance(context.get("exception"), ConnectionError):
        _log.info("a request to a bucket broke off: %s", context["exception"])
    else:
        loop.default_exception_handler(context)


def blob_name(digest: str) -> str:
    """The name under which a blob is stored."""
    return f"{digest[:2]}/{digest}"
