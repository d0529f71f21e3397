"""A part of an audit log that has become a file of its own, compressed and signed.

gzip of the log's own lines, entries `first` to `last` with their seals, and behind them

    {"archive": a signed statement: first, last, previous, hash, digest, time}

`previous` is the hash of the entry before the first, `hash` that of the last, `digest` the lines' BLAKE3.
In the log that remains, the statement stands in the place of the lines. So archives and what remains, end to
end, are the whole log again; with the statement alone the chain goes on over a part that is not at hand.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from roundtable.core.bounds import is_digest
from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.identity.credentials import Role, SiloIdentity
from roundtable.core.identity.signing import Signed, canonical, envelope, open_envelope

SUFFIX = ".jsonl.gz"
MOST_BYTES = 1 << 30
"""Of an archive's lines; what writes archives ends them long before."""
_LEVEL = 9
_NAME = re.compile(r"audit-(\d{10,20})-(\d{10,20})\.jsonl\.gz", re.ASCII)


@dataclass(frozen=True)
class LogArchive:
    """Which entries an archive holds, and how the chain enters and leaves it."""

    first: int
    last: int
    previous: str
    hash: str
    digest: str

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"audit-{self.first:010d}-{self.last:010d}{SUFFIX}"

    def signed(self, identity: SiloIdentity, time: float) -> dict[str, Any]:
        """The statement, signed by whose log it is."""
        return envelope(identity, "archive", {**asdict(self), "time": time})


def named_archive(name: str) -> tuple[int, int] | None:
    """First and last entry by a file's name; None for a file of another name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


class LinesDigest:
    """The digest of lines as an archive states it."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, line: str) -> None:
        """One more line, without its end."""
        self._hasher.update(line.encode() + b"\n")

    def hex(self) -> str:
        """Of all lines so far."""
        return self._hasher.hexdigest()


def statement_line(document: Mapping[str, Any]) -> str:
    """The statement's line, in an archive and in the log that remains."""
    return canonical({"archive": document}).decode()


def opened_archive(document: Any, ca: bytes, role: Role) -> tuple[LogArchive, Signed]:
    """What a statement says. AuditError where nobody of this role has signed it, or it cannot be."""
    try:
        signed = open_envelope(document, ca, role, "archive")
        values = {name: signed.values[name] for name in ("first", "last", "previous", "hash", "digest")}
    except (IdentityError, KeyError, TypeError, ValueError) as error:
        raise AuditError(f"this statement of an archive does not hold: {error}") from error
    first, last = values["first"], values["last"]
    texts = all(is_digest(str(values[name])) for name in ("previous", "hash", "digest"))
    if type(first) is not int or type(last) is not int or not 1 <= first <= last or not texts:
        raise AuditError("this statement of an archive does not hold: it names no entries")
    return LogArchive(**values), signed


def pack(lines: Iterable[str]) -> Iterator[bytes]:
    """The bytes of an archive's file; the same lines give the same bytes."""
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", compresslevel=_LEVEL, mtime=0, filename="") as file:
        for line in lines:
            file.write(line.encode() + b"\n")
            if made.tell() > 1 << 20:
                yield made.getvalue()
                made.seek(0)
                made.truncate()
    yield made.getvalue()


def unpack(file: Path | bytes) -> Iterator[str]:
    """The lines of an archive. AuditError where it is none, or is longer than any that is written."""
    name = "the archive" if isinstance(file, bytes) else str(file)
    source: IO[bytes] | Path = io.BytesIO(file) if isinstance(file, bytes) else file
    left = MOST_BYTES
    try:
        with gzip.open(source, "rb") as unpacked:
            while line := unpacked.readline(left + 1):
                left -= len(line)
                if left < 0:
                    raise AuditError(
                        f"{name} unpacks to more than {MOST_BYTES:,} bytes: that is not an archive"
                    )
                yield line.decode("utf-8", errors="replace").rstrip("\n")
    except (OSError, EOFError, zlib.error) as error:
        raise AuditError(f"{name} is not a whole archive of a log: {error}") from error
