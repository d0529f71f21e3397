"""The home of a coordinator's artifacts in an object store: each is there before the database names it.

    BUCKET/ab/abcdef…       every artifact, read back and compared by hash when it was put there
    BUCKET/coordinator      identity of the database that these belong to

The folder of artifacts is then a cache: any coordinator on the same database, on any machine, can go on
with an empty one. Sizes are listed once, when a coordinator becomes the active one, which alone writes.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from roundtable.core.errors import StorageError
from roundtable.server.storage.location import PARTIAL, Location, Unreachable, blob_name

log = logging.getLogger("roundtable.server.storage.bucket")

THREADS = 8
OWNER = "coordinator"
PURGE_SECONDS, LONGEST_PAUSE = 1.0, 60.0


class Bucket:
    """The artifacts' home. All methods but those that say so block: call them in one of its `threads`.

    They raise Unreachable where the store does not answer: nothing that was asked for then counts.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        # Of its own: what waits for the bucket must hold up neither transfers nor the lease.
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bucket")
        self._place = Location(address, "bucket")
        self._sizes: dict[str, int] = {}
        self._doomed: set[str] = set()
        self._deleting = Lock()

    def check_owner(self, identity: str) -> bool:
        """Returns whether the bucket is claimed. StorageError if by another database (empty: a new one)."""
        data = self._place.read(OWNER)
        owner = data.decode(errors="replace") if data is not None else identity
        if owner != identity:
            raise StorageError(
                f"the bucket {self.address} belongs to coordinator {owner[:12]}, the database to "
                f"{identity[:12] or 'none yet'}: use the database and the bucket that belong together"
            )
        return data is not None

    def open(self, identity: str) -> None:
        """Claims the bucket for this database, and lists what is there."""
        if not self.check_owner(identity):
            self._place.write(OWNER, identity.encode())
            self.check_owner(identity)
        contents = self._place.contents()
        self._doomed.update(name for name in contents if name.endswith(PARTIAL))
        self._sizes = {name[3:]: size for name, size in contents.items() if name == blob_name(name[3:])}

    def is_empty(self) -> bool:
        """Whether nothing lies there."""
        return not self._place.contents()

    def clear(self) -> None:
        """Deletes everything that lies there: what a restore that failed has put into an empty one."""
        for name in self._place.contents():
            self._place.forget(name)
        self._sizes.clear()

    def put(self, source: Path, digest: str) -> None:
        """Makes a blob durable here."""
        size = source.stat().st_size
        if self._sizes.get(digest) == size:
            return
        with self._deleting:
            self._doomed.discard(blob_name(digest))
        self._place.put(source, digest)
        self._sizes[digest] = size

    def get(self, digest: str, target: Path) -> bool:
        """Fetches a blob into a file; False if it is not here, or damaged."""
        if self._place.get(digest, target):
            return True
        self._sizes.pop(digest, None)
        return False

    def size(self, digest: str) -> int | None:
        """Bytes of a blob; None if it is not here. Does not block."""
        return self._sizes.get(digest)

    def digests(self) -> list[str]:
        """Every blob that lies here now."""
        return [name[3:] for name in self._place.contents() if name == blob_name(name[3:])]

    def forget(self, digest: str) -> None:
        """Queues a blob for deletion. Does not block."""
        self._sizes.pop(digest, None)
        self._doomed.add(blob_name(digest))

    async def run(self) -> None:
        """Deletes what `forget` has queued; tries again where that fails; runs until cancelled."""
        pause = PURGE_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                await asyncio.get_running_loop().run_in_executor(self.threads, self._purge)
                pause = PURGE_SECONDS
            except Unreachable as error:
                pause = min(2 * pause, LONGEST_PAUSE)
                log.error("what is not needed any more stays for now: %s; trying again", error)

    def close(self) -> None:
        """Waits for what is under way, and ends the threads."""
        self.threads.shutdown(wait=True, cancel_futures=True)

    def _purge(self) -> None:
        for name in list(self._doomed):
            with self._deleting:
                # Whoever stores it anew takes it off the list first, under the same lock.
                if name in self._doomed:
                    self._place.forget(name)
                    self._doomed.discard(name)
