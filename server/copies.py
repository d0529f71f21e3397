"""Copies of models in further places: a second disk, a bucket; written after each commit and verified.

A location is an address as fsspec takes it: `/mnt/second/models`, `s3://bucket/prefix` (with s3fs installed),
`sftp://…`. Below it a model lies under `ab/abcdef…`, as in the coordinator's own folder. An artifact that is
missing or damaged there is fetched from the first location that has it whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import fsspec
from blake3 import blake3

from roundtable.core.errors import ConfigError, StorageError
from roundtable.server.artifacts import LocalArtifacts

log = logging.getLogger("roundtable.server.copies")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
PIECE = 4 << 20


class Location:
    """One place. Its methods block, and raise OSError where the place cannot be reached."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._files, self._root = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"copies: {address!r} cannot be used: {error}") from error

    def has(self, digest: str) -> bool:
        """Whether something lies there under this name."""
        return bool(self._files.exists(self._place(digest)))

    def put(self, source: Path, digest: str) -> None:
        """Copies, then reads back; StorageError if that has another digest."""
        place = self._place(digest)
        self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(source), f"{place}.partial")
        found = self._digest_of(f"{place}.partial")
        if found != digest:
            self._files.rm_file(f"{place}.partial")
            raise StorageError(f"the copy of {digest[:12]} at {self.address} has the digest {found[:12]}")
        self._files.mv(f"{place}.partial", place)

    def get(self, digest: str, target: Path) -> bool:
        """Fetches to a new file; False if it is not there or damaged there."""
        if not self.has(digest) or self._digest_of(self._place(digest)) != digest:
            return False
        partial = target.with_name(f"{digest}.fetched")
        self._files.get_file(self._place(digest), str(partial))
        partial.replace(target)
        return True

    def forget(self, digest: str) -> None:
        """Deletes it, if it is there."""
        if self.has(digest):
            self._files.rm_file(self._place(digest))

    def _place(self, digest: str) -> str:
        return f"{self._root.rstrip('/')}/{digest[:2]}/{digest}"

    def _digest_of(self, place: str) -> str:
        found = blake3()
        with self._files.open(place, "rb") as file:
            while data := file.read(PIECE):
                found.update(data)
        return found.hexdigest()


class Copies:
    """All locations. What is offered is copied in the background, however long that takes."""

    def __init__(self, addresses: Sequence[str], artifacts: LocalArtifacts) -> None:
        self._locations = [Location(address) for address in addresses]
        self._artifacts = artifacts
        self._wanted: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        if self._locations:
            artifacts.refetch = self.fetch

    def offer(self, digest: str) -> None:
        """This model is to be copied."""
        if digest and self._locations:
            self._wanted.put_nowait((digest, True))

    def forget(self, digests: Sequence[str]) -> None:
        """These are not kept any more, here or there."""
        if self._locations:
            for digest in digests:
                self._wanted.put_nowait((digest, False))

    def fetch(self, digest: str, target: Path) -> bool:
        """Brings a missing or damaged artifact back; False if no location has it whole. Blocks."""
        for location in self._locations:
            try:
                if location.get(digest, target):
                    log.warning("artifact %s was damaged and is back from %s", digest[:12], location.address)
                    return True
            except OSError as error:
                log.error("%s cannot be read: %s", location.address, error)
        return False

    async def run(self) -> None:
        """Does what is wanted, in order; tries again where that fails; runs until cancelled."""
        while True:
            digest, keep = await self._wanted.get()
            for location in self._locations:
                await self._insist(location, digest, keep)

    async def _insist(self, location: Location, digest: str, keep: bool) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await asyncio.to_thread(self._do, location, digest, keep)
                return
            except FileNotFoundError:
                return
            except (OSError, StorageError) as error:
                log.error("%s: %s; trying again", location.address, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _do(self, location: Location, digest: str, keep: bool) -> None:
        if not keep:
            location.forget(digest)
        elif not location.has(digest) and self._artifacts.size(digest) is not None:
            location.put(self._artifacts.path(digest), digest)
