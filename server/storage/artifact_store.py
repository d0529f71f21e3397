"""Blobs named by their BLAKE3 digest, on local disk, and in a bucket if there is one.

    artifacts/
      objects/ab/abcdef…    whole, verified, never changed
      partial/OWNER.DIGEST  what has arrived so far of an upload; survives restarts
      coordinator           identity of the database that these files belong to
      verified              which large files were whole, and how they looked then

A blob gets its name only after it is whole, its hash is right, it is in the bucket, and it and its folder
are synced: what the database mentions is there. A new blob is *pinned*, that is not deleted, until it is
mentioned. All methods but `size` and `unpin` block: call them in a thread.

That a file is whole is known from when it was written; what a disk gives back later can be something else,
and no time stamp shows it. So `path` is for those who check what they read themselves (rows as they are
combined, downloads as they are sent); the others read in `using` or with `load`, which hash what was read.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import FileIO
from math import inf
from pathlib import Path
from threading import Lock

from blake3 import blake3

from roundtable.core.bounds import is_digest
from roundtable.core.errors import ResourceError, StorageError
from roundtable.core.failpoints import failpoint
from roundtable.core.machine.file_access import sync_folder
from roundtable.server.storage.blobs import READ_BYTES, BlobWriter, os_error
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.verified_files import VerifiedFiles, stamp_of

log = logging.getLogger("roundtable.server.storage.artifact_store")


class DamagedArtifact(StorageError):
    """A blob that is missing, or whose bytes are not those of its digest."""

    def __init__(self, digest: str, message: str) -> None:
        super().__init__(message)
        self.digest = digest


class ArtifactStore:
    """Artifacts in a folder of this machine; with a bucket, that is their home and the folder a cache of it.

    `refetch` looks elsewhere for what is missing or damaged, and writes it into the file it is given.
    """

    def __init__(self, folder: Path, identity: str, bucket: Bucket | None = None) -> None:
        self.folder = folder
        self.bucket = bucket
        self._objects = folder / "objects"
        self._partial = folder / "partial"
        self.refetch: Callable[[str, Path], bool] | None = None
        self._verified = VerifiedFiles(folder / "verified")
        self._pins: Counter[str] = Counter()
        self._lock = Lock()
        # One thread looks for a blob, others that want it wait.
        self._looking = [Lock() for _ in range(64)]
        self._check_folder(identity)
        self._verified.load()
        if bucket is not None:
            bucket.open(identity)

    def threads(self, usual: ThreadPoolExecutor) -> ThreadPoolExecutor:
        """The threads that finish and look up blobs: a bucket's own, so that nothing else waits for it."""
        return usual if self.bucket is None else self.bucket.threads

    def path(self, digest: str) -> Path:
        """A local file with the blob, its hash checked, brought here first if need be.

        DamagedArtifact if it is missing or damaged wherever it could be, Unreachable if the bucket is away.
        """
        if path := self.known(digest):
            return path
        with self._looking[int(digest[:2], 16) % len(self._looking)]:
            return self.known(digest) or self._look(self._place(digest), digest)

    def known(self, digest: str) -> Path | None:
        """What `path` gives where that is known without reading or fetching anything; else None."""
        path = self._place(digest)
        return path if self._verified.known(digest, path) else None

    def mend(self, digest: str) -> None:
        """Hashes a blob that was read with other bytes than its own, and fetches it where it is damaged;
        raises as `path`."""
        self._verified.forget(digest)
        self.path(digest)

    @contextmanager
    def using(self, digest: str) -> Iterator[Path]:
        """A file that may be mapped within the context; it is hashed at the end.

        Hashed afterwards, a bit that flipped at any time before it was used is seen. DamagedArtifact at the
        end, and in the place of whatever error came of the damage: `mend` it and begin again. Unreachable as
        for `path`.
        """
        path = self.path(digest)
        with self._open(path, digest) as file:
            try:
                yield path
            except Exception:
                # A name with another letter is a KeyError.
                self._require(path, file, digest)
                raise
            self._require(path, file, digest)

    def load(self, digest: str) -> bytes:
        """The blob in memory: the very bytes that were hashed. DamagedArtifact, Unreachable as for `path`."""
        for _ in range(2):
            data = self.path(digest).read_bytes()
            if (found := blake3(data).hexdigest()) == digest:
                return data
            self.mend(digest)
        raise self._damaged(digest, found)

    def size(self, digest: str) -> int | None:
        """Bytes of the blob; None if it is not stored, durably."""
        if self.bucket is not None:
            return self.bucket.size(digest)
        try:
            return self._place(digest).stat().st_size
        except FileNotFoundError:
            return None

    def receive(
        self,
        owner: str,
        digest: str,
        size: int,
        observe: Callable[[bytes | memoryview], None] | None = None,
        offset: int | None = None,
    ) -> BlobWriter:
        """For an upload or the rest of it, from `offset` if given, otherwise from where it stopped; to be
        opened. `observe` sees all bytes in order, those of before first."""
        partial = self._partial / _partial_name(owner, digest)
        return BlobWriter(partial, size, digest, self._adopt, observe, offset, direct=True)

    def received(self, owner: str, digest: str) -> int:
        """Bytes that have arrived of an upload that is not whole."""
        try:
            return (self._partial / _partial_name(owner, digest)).stat().st_size
        except FileNotFoundError:
            return 0

    def unfinished(self, owner: str) -> list[str]:
        """Digests of what an owner has begun to upload and not ended, what was left alone longest first."""
        kept = [path for path in self._partial.iterdir() if path.name.rpartition(".")[0] == owner]
        times = {path: stamp[0] for path in kept if (stamp := stamp_of(path))}
        return [path.name.rpartition(".")[2] for path in sorted(times, key=times.__getitem__)]

    def drop(self, owner: str, digest: str) -> None:
        """Deletes an unfinished upload."""
        (self._partial / _partial_name(owner, digest)).unlink(missing_ok=True)

    def create(self, blocks: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Stores the blocks as one blob, pinned; returns its digest and size."""
        with self.creating() as writer:
            for block in blocks:
                writer.append(block)
            return writer.finish()

    @contextmanager
    def creating(self) -> Iterator[BlobWriter]:
        """For a blob that is written block by block; nothing stays of one that is not finished."""
        with self.scratch() as partial, closing(BlobWriter(partial, None, None, self._adopt)) as writer:
            yield writer.open()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A name for a file of this process, which is deleted at the end, or at the next start."""
        partial = self._partial / f"own.{os.urandom(8).hex()}"
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)

    def settle(self, digests: Iterable[str]) -> int:
        """Puts into the bucket what only the folder has of these; returns how many are nowhere."""
        missing = 0
        for digest in digests:
            if self.bucket is None or self.bucket.size(digest) is not None:
                continue
            try:
                self._verify(self._place(digest), digest)
                self.bucket.put(self._place(digest), digest)
            except DamagedArtifact as error:
                log.error("%s", error)
                missing += 1
        return missing

    def discard(self, prefix: str, before: float = inf) -> None:
        """Deletes unfinished uploads whose owner begins with a prefix, untouched since a Unix time."""
        for path in self._partial.iterdir():
            stamp = stamp_of(path)
            if path.name.startswith(prefix) and stamp and stamp[0] < before * 1e9:
                path.unlink(missing_ok=True)

    def delete(self, digests: Iterable[str]) -> int:
        """Deletes blobs that are not pinned; returns how many. Those in the bucket go soon afterwards."""
        count = 0
        for digest in digests:
            with self._lock:
                if self._pins[digest]:
                    continue
                place = self._place(digest)
                count += place.exists() or self.size(digest) is not None
                self._verified.forget(digest)
                place.unlink(missing_ok=True)
                if self.bucket is not None:
                    self.bucket.forget(digest)
        return count

    def digests(self) -> list[str]:
        """Every blob, here or in the bucket. Unreachable if that is away."""
        in_bucket = [] if self.bucket is None else self.bucket.digests()
        here = (path.name for path in self._objects.glob("*/*"))
        return sorted(name for name in {*here, *in_bucket} if is_digest(name))

    def unpin(self, digests: Iterable[str]) -> None:
        """Lets these be deleted again: the database mentions them now, or nobody will."""
        with self._lock:
            self._pins.subtract(digests)
            self._pins += Counter()

    def free_bytes(self) -> int:
        """Free space on the disk."""
        return shutil.disk_usage(self.folder).free

    def disk_bytes(self) -> int:
        """Size of the disk."""
        return shutil.disk_usage(self.folder).total

    def _place(self, digest: str) -> Path:
        if not is_digest(digest):
            raise StorageError(f"{digest[:80]!r} is no BLAKE3 digest: 64 hexadecimal digits are one")
        return self._objects / digest[:2] / digest

    def _adopt(self, partial: Path, digest: str) -> None:
        """Takes in a finished file.

        Pins it first: what the database does not mention yet must not be deleted.
        """
        failpoint("blob_synced")
        with self._lock:
            self._pins[digest] += 1
        try:
            if self.bucket is not None:
                self.bucket.put(partial, digest)
            self._name(partial, digest)
        except (OSError, StorageError):
            self.unpin([digest])
            raise
        failpoint("blob_named")

    def _name(self, partial: Path, digest: str) -> None:
        """Gives a file with the right bytes its name."""
        place = self._place(digest)
        with self._lock:
            if not place.parent.is_dir():
                self._make_places()  # Somebody tidies up empty folders.
            partial.replace(place)
            self._verified.note(digest, place)
        sync_folder(place.parent)

    def _look(self, path: Path, digest: str) -> Path:
        try:
            self._verify(path, digest)
        except DamagedArtifact:
            if not self._bring(digest):
                raise
        else:
            self._verified.note(digest, path)
        return path

    def _bring(self, digest: str) -> bool:
        """Fetches a blob from the bucket or a replica; False if no place has it whole."""
        with self.scratch() as partial:
            try:
                fetched = self.bucket is not None and self.bucket.get(digest, partial)
                if not fetched and self.refetch is not None and self.refetch(digest, partial):
                    fetched = True
                    if self.bucket is not None:
                        self.bucket.put(partial, digest)
                if fetched:
                    self._name(partial, digest)
            except OSError as error:
                raise os_error(error, partial) from error
        return fetched

    @property
    def _where(self) -> str:
        return f"{self.folder}" if self.bucket is None else f"{self.folder} and {self.bucket.address}"

    def _verify(self, path: Path, digest: str) -> None:
        """Hashes a blob that this process has not written itself, once, before anything reads it."""
        with self._open(path, digest) as file:
            self._check(path, file, digest)

    def _require(self, path: Path, file: FileIO, digest: str) -> None:
        """DamagedArtifact unless this file, and what has the blob's name by now, hold the blob's bytes.

        They are two where the same blob was stored again meanwhile: a reader may have opened either.
        """
        stamp = stamp_of(path)
        if stamp is None:
            raise DamagedArtifact(digest, f"artifact {digest} was removed while it was read")
        self._check(path, file, digest)
        if stamp[-1] != os.fstat(file.fileno()).st_ino:
            self._verify(path, digest)

    def _check(self, path: Path, file: FileIO, digest: str) -> None:
        hasher = blake3()
        try:
            while data := file.read(READ_BYTES):
                hasher.update(data)
        except OSError as error:
            raise os_error(error, path) from error
        if hasher.hexdigest() != digest:
            raise self._damaged(digest, hasher.hexdigest())

    def _open(self, path: Path, digest: str) -> FileIO:
        try:
            return FileIO(path)
        except FileNotFoundError:
            raise DamagedArtifact(
                digest, f"artifact {digest} is missing from {self._where}: restore it from a backup"
            ) from None
        except OSError as error:
            raise os_error(error, path) from error

    def _damaged(self, digest: str, found: str) -> DamagedArtifact:
        return DamagedArtifact(
            digest,
            f"artifact {digest} in {self._where} is damaged: its bytes have the digest {found}; restore it "
            "from a backup and check the disk",
        )

    def _make_places(self) -> None:
        """Makes the folders that blobs lie in: made with a blob, one would be a sync more to wait for."""
        missing = [name for each in range(256) if not (self._objects / (name := f"{each:02x}")).is_dir()]
        for name in missing:
            (self._objects / name).mkdir(mode=0o700, exist_ok=True)
        if missing:
            sync_folder(self._objects)

    def _check_folder(self, identity: str) -> None:
        owner = self.folder / "coordinator"
        try:
            for folder in (self._objects, self._partial):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_places()
            for path in self._partial.glob("own.*"):
                path.unlink()
            if not owner.exists():
                owner.write_text(identity, encoding="ascii")
                sync_folder(self.folder)
            owned_by = owner.read_text(encoding="ascii")
        except OSError as error:
            raise ResourceError(
                f"the artifact folder {self.folder} cannot be used: {error.strerror}; it must be writable "
                "by the user who runs the coordinator"
            ) from error
        _compare(self.folder, owned_by, identity)


def check_owner(folder: Path, identity: str) -> None:
    """Raises StorageError if the folder belongs to another database than this one (empty: a new one)."""
    try:
        owned_by = (folder / "coordinator").read_text(encoding="ascii")
    except OSError:
        return
    _compare(folder, owned_by, identity)


def _compare(folder: Path, found: str, identity: str) -> None:
    if found != identity:
        raise StorageError(
            f"the artifact folder {folder} belongs to coordinator {found[:12]}, the database to "
            f"{identity[:12] or 'none yet'}: use the database and the folder that belong together"
        )


def _partial_name(owner: str, digest: str) -> str:
    if not is_digest(digest) or "/" in owner or owner.startswith("own."):
        raise StorageError(f"{owner!r} with {digest[:80]!r} cannot name an upload")
    return f"{owner}.{digest}"
