"""Records of a tar file in the WebDataset manner, read from any of them on.

Members that follow each other and have one name before the first dot of the last part are one record; the
rest of the name, in lower case, is the member's key. Names are only compared: no path is ever made of one.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from gzip import BadGzipFile
from lzma import LZMAError
from typing import IO, Any

from roundtable.core.errors import TaskError

NOT_A_TAR = (tarfile.TarError, zlib.error, LZMAError, EOFError, BadGzipFile)
"""What reading a damaged file raises."""
_NAMED = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_ABOUT_THE_SHARD = re.compile(r"__[^/]*__(?:/|$)")
_MOST_MEMBERS = 1 << 10


class Sample(dict[str, Any]):
    """A record as `decode` gets it: bytes by member key, and the record's name as `__key__`."""

    def __missing__(self, key: str) -> Any:
        error = TaskError(
            f"a record has no member {key!r} that decode() asks for; repair the shard, or ask by .get()"
        )
        error.add_note(f"the record has {sorted(self)}")
        raise error


@dataclass(frozen=True)
class Record:
    """One record: None in the place of a sample that was not wanted; `end` None behind the shard's last."""

    name: str
    sample: Sample | None
    end: int | None


class DamagedShard(TaskError):
    """A shard is not what a tar file must be."""


def read_records(file: IO[bytes], start: int, wanted: Callable[[], bool], most: int) -> Iterator[Record]:
    """Reads the records from byte `start` of the tar stream on; `start` is 0 or the `end` of a record.

    `wanted` is asked once for each record, in order; the bytes of one that is not wanted are skipped. Raises
    DamagedShard for a file that is cut off or is no tar file, and for a record of more than `most` bytes.
    """
    name, sample, size, load = "", Sample(), 0, False
    for header, at in _headers(file, start):
        found = _NAMED.fullmatch(header.name)
        if not header.isreg() or found is None or _ABOUT_THE_SHARD.match(header.name):
            continue
        if found[1] != name:
            if name:
                yield Record(name, sample if load else None, at)
            name, sample, size, load = found[1], Sample(__key__=found[1]), 0, wanted()
        size += header.size
        _check(header, sample, size, most)
        sample[found[2].lower()] = _body(file, header) if load else None
    if name:
        yield Record(name, sample if load else None, None)


def _check(header: tarfile.TarInfo, sample: Sample, size: int, most: int) -> None:
    if size > most:
        raise DamagedShard(
            f"a record has more than the {most:,} bytes that are allowed; raise most_bytes of TarShards if "
            "it is what you meant to store"
        )
    if header.issparse():
        raise DamagedShard("a member is a sparse file, which shards cannot hold; store it whole")
    if header.name.rpartition("/")[2].partition(".")[2].lower() in sample or len(sample) > _MOST_MEMBERS:
        raise DamagedShard("a record has two members of one key, or too many; give records different names")


def _headers(file: IO[bytes], start: int) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yields each member with where its headers begin.

    tarfile's own loop takes a damaged header, or a file that is cut off between two members, for the end.
    """
    file.seek(start)
    archive = tarfile.TarFile(fileobj=file, mode="r")
    at = start
    while True:
        archive.offset = at
        file.seek(at)
        try:
            header = tarfile.TarInfo.fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return
        yield header, at
        at = archive.offset


def _body(file: IO[bytes], header: tarfile.TarInfo) -> bytes:
    file.seek(header.offset_data)
    data = file.read(header.size)
    if len(data) < header.size:
        raise DamagedShard("it is cut off within a member")
    return data
