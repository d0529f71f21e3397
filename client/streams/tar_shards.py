"""Training data in tar files, here or behind any address that fsspec reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from roundtable.client.streams.shard_lists import shard_list
from roundtable.client.streams.shard_marks import ShardMark
from roundtable.client.streams.tar_records import NOT_A_TAR, DamagedShard, Record, read_records
from roundtable.core.errors import TaskError
from roundtable.core.extras import load, missing
from roundtable.core.paths import AnyPath

_TGZ = (".tgz", ".tar.gz")


class TarShards(IterableDataset[Any]):
    """Examples in tar files, in the manner of WebDataset: files of one name before the first dot are one
    record.

    `decode` makes an example of a record: a mapping from key ("jpg", "cls", "seg.png": what follows the first
    dot, in lower case) to bytes, with the record's name as `__key__`. Training reads the shards in an order
    drawn anew for each epoch, `lanes` of them side by side, and mixes the records of each lane in a buffer of
    `shuffle` / `lanes`: one process and any number of ranks take the same examples. To iterate over it
    directly gives the records in the order in which they are written.
    """

    def __init__(
        self,
        urls: AnyPath | Sequence[AnyPath],
        decode: Callable[[Mapping[str, Any]], Any],
        *,
        shuffle: int = 1000,
        lanes: int = 8,
        options: Mapping[str, Any] | None = None,
        most_bytes: int = 256 << 20,
    ) -> None:
        """`urls`: paths or addresses, braces counting (`s3://scans/train-{000..127}.tar`), plain or
        compressed.

        `shuffle`: records held in memory to be mixed, 0 for the order in which they are written. `lanes`:
        shards read at once, and ranks that can share the reading; fewer where there are fewer shards.
        `options` are fsspec's for the address (a profile, an endpoint). `most_bytes` bounds one record.
        Raises TaskError for values that make no sense.
        """
        for name, value, least in (
            ("shuffle", shuffle, 0),
            ("lanes", lanes, 1),
            ("most_bytes", most_bytes, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 50:
                raise TaskError(f"TarShards: {name} is {value!r}; a whole number of at least {least} can be")
        self.urls = shard_list(urls)
        self.lanes = min(lanes, len(self.urls))
        self.block = max(1, -(-shuffle // self.lanes))
        self._decode = decode
        self._options = dict(options or {})
        self._most = most_bytes

    @override
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for shard in range(first, len(self.urls), step):
            for record in self.records(shard, 0, lambda: True):
                yield self.decoded(record)

    @property
    def definition(self) -> str:
        """Digest of all that a position in the data counts on: the names of the shards, lanes and buffer.

        Where they lie does not count: data may move, and addresses may be signed anew each day.
        """
        names = [url.partition("?")[0].rpartition("/")[2] for url in self.urls]
        text = json.dumps([names, self.lanes, self.block])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def records(
        self,
        shard: int,
        start: int,
        wanted: Callable[[], bool],
        meet: Callable[[ShardMark], None] | None = None,
    ) -> Iterator[Record]:
        """Reads a shard's records from byte `start` on, those that are `wanted` with their bytes.

        `meet` is told which file it is, before anything is read, and may raise.

        Raises TaskError, without names of files, for a shard that is missing, damaged or out of reach: what
        is told here may leave the silo. Notes for the silo's own log say more.
        """
        with self._named(shard), self._opened(shard, meet) as file:
            yield from read_records(file, start, wanted, self._most)

    def decoded(self, record: Record) -> Any:
        """The example of a record that was wanted. What `decode` raises gets a note with the record's
        name."""
        assert record.sample is not None
        try:
            return self._decode(record.sample)
        except Exception as error:
            error.add_note(f"decode() was given the record {record.name!r}")
            raise

    @contextmanager
    def _opened(self, shard: int, meet: Callable[[ShardMark], None] | None) -> Iterator[IO[bytes]]:
        url = self.urls[shard]
        plain = url.partition("?")[0].lower()
        compression = "gzip" if plain.endswith(_TGZ) else "infer"
        fsspec = load("fsspec", "reading shards")
        try:
            handle = fsspec.open(url, "rb", compression=compression, **self._options)
        except ImportError as error:
            known = missing(error, f"{url.partition('://')[0]}://")
            raise TaskError(f"cannot be read: {known or error}") from error
        except ValueError as error:
            protocol = url.partition("://")[0]
            raise TaskError(f"has an address that fsspec does not read ({protocol!r}): {error}") from error
        with handle as file:
            if meet is not None:
                meet(ShardMark.of(url, handle))
            yield file

    @contextmanager
    def _named(self, shard: int) -> Iterator[None]:
        """Errors say which shard they are about."""
        try:
            yield
        except Exception as error:
            said = f"shard {shard + 1} of {len(self.urls)}"
            failure = TaskError(f"{said} of the training data {_what_is_wrong(error)}")
            failure.add_note(f"{said} is {self.urls[shard]}")
            raise failure from error


def _what_is_wrong(error: Exception) -> str:
    """Words that may leave the silo: no name of a file, no message of a library about one."""
    if isinstance(error, FileNotFoundError):
        return "is not there; bring it back, or name the shards that there are"
    if isinstance(error, DamagedShard):
        return f"is damaged: {error}"
    if isinstance(error, TaskError):
        return str(error)
    if isinstance(error, NOT_A_TAR):
        return f"is damaged ({type(error).__name__}): cut off, or no tar file; write it again"
    return f"cannot be read ({type(error).__name__}); the silo's log says why"
