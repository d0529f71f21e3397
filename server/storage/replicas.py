"""Copies of models in further places: a second disk, a bucket; written after each commit and verified.

An artifact that is missing or damaged at home is fetched from the first location that has it whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from roundtable.core.errors import StorageError
from roundtable.server.storage.artifact_store import ArtifactStore, DamagedArtifact
from roundtable.server.storage.location import Location, Unreachable, blob_name

log = logging.getLogger("roundtable.server.storage.replicas")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0


class Replicas:
    """Copies artifacts to all locations in the background, however long that takes."""

    def __init__(self, addresses: Sequence[str], artifacts: ArtifactStore) -> None:
        self._locations = [Location(address, "copies") for address in addresses]
        self._artifacts = artifacts
        self._wanted: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        if self._locations:
            artifacts.refetch = self.fetch

    def offer(self, digest: str) -> None:
        """Queues a model to be copied."""
        if digest and self._locations:
            self._wanted.put_nowait((digest, True))

    def forget(self, digests: Sequence[str]) -> None:
        """Queues the copies of these artifacts to be deleted."""
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
            except Unreachable as error:
                log.error("%s", error)
        return False

    async def run(self) -> None:
        """Works off the queue in order; tries again where that fails; runs until cancelled."""
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
            except (FileNotFoundError, DamagedArtifact) as error:
                log.error("%s is not copied to %s: %s", digest[:12], location.address, error)
                return
            except StorageError as error:
                log.error("%s: %s; trying again", location.address, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _do(self, location: Location, digest: str, keep: bool) -> None:
        if not keep:
            location.forget(blob_name(digest))
        elif not location.has(blob_name(digest)) and self._artifacts.size(digest) is not None:
            try:
                location.put(self._artifacts.path(digest), digest)
            except Unreachable:
                # What came back wrong may have been wrong here.
                self._artifacts.mend(digest)
                raise
