"""Copies of artifacts in other folders: hashed as they are read, synced, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import StorageError
from roundtable.core.machine.file_access import sync_folder
from roundtable.server.config import ServerConfig
from roundtable.server.storage.blobs import READ_BYTES, os_error
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.location import Location, blob_name


class Vanished(Exception):
    """An artifact that the database mentioned is not where it should be, or is damaged there."""


def make_folders(*folders: Path) -> None:
    """Makes missing folders, readable by this user alone."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise os_error(error, folder) from error


def copy_artifact(source: Path, target: Path, digest: str) -> None:
    """Copies an artifact, hashing what is read; what is there already is not copied again."""
    place = target / digest[:2] / digest
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    try:
        write_file(partial, artifact_pieces(source / digest[:2] / digest))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(place)
    sync_folder(place.parent)


def fetch_artifact(bucket: Bucket, place: Path) -> None:
    """Fetches an artifact from the bucket, as a coordinator on another machine would."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    if not bucket.get(place.name, partial):
        raise Vanished
    partial.replace(place)
    sync_folder(place.parent)


def artifact_pieces(path: Path) -> Iterator[bytes]:
    """An artifact's bytes. Vanished where it is missing, StorageError where they are not its own."""
    try:
        yield from checked(path.name, pieces_of(path), f"in {path.parent.parent}")
    except FileNotFoundError as error:
        raise Vanished from error


def stored_pieces(config: ServerConfig, digest: str) -> Iterator[bytes]:
    """An artifact's bytes from where a coordinator with these settings has it; see `artifact_pieces`."""
    if not config.bucket:
        return artifact_pieces(Path(config.artifacts) / "objects" / blob_name(digest))
    pieces = Location(config.bucket, "bucket").stream(blob_name(digest))
    if pieces is None:
        raise Vanished
    return checked(digest, pieces, f"in {config.bucket}")


def checked(digest: str, pieces: Iterable[bytes], where: str) -> Iterator[bytes]:
    """The same pieces; StorageError at their end where they do not have the digest."""
    hasher = blake3()
    for data in pieces:
        hasher.update(data)
        yield data
    if (found := hasher.hexdigest()) != digest:
        raise StorageError(f"artifact {digest} {where} is damaged: its bytes have the digest {found}")


def pieces_of(path: Path) -> Iterator[bytes]:
    """A file's bytes."""
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data


def write_file(path: Path, blocks: Iterable[bytes]) -> None:
    """Writes a file, synced. ResourceError where the disk is full."""
    try:
        with path.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        raise os_error(error, path) from error
