"""What a shard is known by while a position stands in it: its size, where it lay, when it was written.

A position is a byte in a file: where the file has become another one, going on from there would read what
nobody meant. Bytes are not read again to compare them: what is asked is what whoever keeps the file says of
it, which an object store tells as the file is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from roundtable.client.streams.kept_position import is_count
from roundtable.core.errors import EncodingError

_TOLD = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "checksum",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
)
"""What file systems of fsspec tell of a file's content, the best first: S3, HTTP, GCS, Azure, local ones."""
_DIGEST = 6


@dataclass(frozen=True)
class ShardMark:
    """A file as it was when it was read: bytes, None where nobody says; digests of its address, without what
    is signed anew each day, and of what was told of its content, "" for nothing."""

    size: int | None
    address: str
    content: str

    @classmethod
    def of(cls, url: str, opened: Any) -> ShardMark:
        """Of a shard that fsspec has opened (an OpenFile within `with`)."""
        details = _details(opened)
        size = details.get("size")
        told = next((f"{name} {details[name]}" for name in _TOLD if details.get(name)), "")
        return cls(
            size if is_count(size) else None, _digest(url.partition("?")[0]), _digest(told) if told else ""
        )

    @classmethod
    def from_plain(cls, values: Any, damaged: str) -> ShardMark:
        """What `plain` gave. EncodingError, in the words of `damaged`, for values that it does not give."""
        match values:
            case [size, str(address), str(content)] if size is None or is_count(size):
                return cls(size, address, content)
        raise EncodingError(damaged)

    @property
    def plain(self) -> list[Any]:
        """As JSON has it."""
        return [self.size, self.address, self.content]

    def other_size(self, now: ShardMark) -> bool:
        """Whether the file has another size by now: it is another one, wherever it lies."""
        return None not in (self.size, now.size) and self.size != now.size

    def written_again(self, now: ShardMark) -> bool:
        """Whether it was written again at the same address; its content may be the same."""
        told = self.content and now.content
        return bool(told) and self.address == now.address and self.content != now.content


def _details(opened: Any) -> Mapping[str, Any]:
    file: IO[bytes] = opened.fobjects[0]
    # A buffered file of an object store has asked already; a local one has not.
    details = getattr(file, "details", None) or opened.fs.info(opened.path)
    return details if isinstance(details, Mapping) else {}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=_DIGEST).hexdigest()
