"""The files of one backup: written, and read back as they were written, encrypted or not.

FOLDER/tables/NAME.jsonl    every row, as one consistent view of the database had it
FOLDER/objects/ab/abcdef…   every artifact that those rows mention
FOLDER/manifest.json        digests of all that, signed by the coordinator
FOLDER/encryption.json      of an encrypted one: how its key is made. Names and lengths of files show
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import StorageError
from roundtable.core.machine.file_access import sync_folder
from roundtable.core.machine.file_locks import lock_file
from roundtable.server.storage.blobs import os_error
from roundtable.server.storage.copies import make_folders, pieces_of, write_file
from roundtable.server.storage.location import blob_name
from roundtable.server.storage.sealing import HEADER, BackupKey, SetCipher

MANIFEST = "manifest.json"
TABLES, OBJECTS = "tables", "objects"
_LOCK = "lock"


class BackupFolder:
    """A backup's folder; digests are those of what was written, whether it is encrypted or not."""

    def __init__(self, path: Path, cipher: SetCipher | None) -> None:
        self.path = path
        self.cipher = cipher

    @classmethod
    def open(cls, path: Path, key: BackupKey | None) -> BackupFolder:
        """A backup that is there. StorageError where the key is not the one that it takes."""
        return cls(path, SetCipher.open(path, key))

    @classmethod
    def begin(cls, path: Path, cipher: SetCipher | None) -> BackupFolder:
        """A new one, in a folder that is there."""
        make_folders(path / TABLES, path / OBJECTS)
        if cipher is not None:
            write_file(path / HEADER, [json.dumps(cipher.header, indent=1).encode()])
        return cls(path, cipher)

    def write(self, name: str, blocks: Iterable[bytes]) -> str:
        """Writes a file, synced; the digest of the blocks."""
        hasher, place = blake3(), self.path / name
        make_folders(place.parent)

        def hashed() -> Iterator[bytes]:
            for block in blocks:
                hasher.update(block)
                yield block

        write_file(place, hashed() if self.cipher is None else self.cipher.seal(name, hashed()))
        return hasher.hexdigest()

    def read(self, name: str) -> Iterator[bytes]:
        """What was written under a name. StorageError where it is missing, or not as it was sealed."""
        place = self.path / name
        try:
            if self.cipher is None:
                yield from pieces_of(place)
                return
            with place.open("rb") as file:
                yield from self.cipher.unseal(name, file)
        except OSError as error:
            raise StorageError(f"{place} cannot be read: {error.strerror}") from error

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file."""
        rest = b""
        for data in self.read(name):
            *whole, rest = (rest + data).split(b"\n")
            yield from whole
        if rest:
            yield rest

    def digest(self, name: str) -> str:
        """The digest of what a file holds now."""
        hasher = blake3()
        for data in self.read(name):
            hasher.update(data)
        return hasher.hexdigest()

    def size(self, name: str) -> int:
        """A file's length in this folder."""
        return (self.path / name).stat().st_size

    def take_over(self, digest: str, earlier: BackupFolder) -> bool:
        """Gives an artifact of an earlier backup a name here, if it is whole there and on the same disk."""
        name = object_name(digest)
        try:
            if earlier.digest(name) != digest:
                return False
            make_folders((self.path / name).parent)
            os.link(earlier.path / name, self.path / name)
        except (OSError, StorageError):
            return False
        return True


def object_name(digest: str) -> str:
    """Where a backup has an artifact."""
    return f"{OBJECTS}/{blob_name(digest)}"


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder that gets the name `folder` at the end of the block; an error or Ctrl-C leaves nothing.

    What a process that was killed has left is thrown away by the next with the same name.
    """
    folder = Path(os.path.abspath(folder))
    if folder.is_mount():
        raise StorageError(f"{folder} is a disk of its own: name a folder in it, such as {folder / 'backup'}")
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(
            f"{folder} is not empty: a backup needs a folder of its own. Name a new one; with "
            f"`--since {folder}` only what is new is copied"
        )
    staging = folder.with_name(f".{folder.name}.partial")
    try:
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise os_error(error, folder) from error
    with (staging / _LOCK).open("w") as lock:
        try:
            lock_file(lock.fileno())
        except BlockingIOError:
            raise StorageError(f"another backup is being written into {folder} right now") from None
        try:
            for left in staging.iterdir():
                if left.name != _LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield staging
            _sync_all(staging)
            (staging / _LOCK).unlink()
            staging.replace(folder)
            sync_folder(folder.parent)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise os_error(error, folder) from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def _sync_all(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))
