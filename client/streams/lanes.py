"""The order of shards and records: drawn from the job's seed, the same for one process and any number of
ranks.

All epochs' permutations of the shards, one behind the other, are an endless row; lane l of L reads every L-th
of it from l on. It fills a buffer with its next b records, gives them in an order drawn for that buffer, and
fills it anew. Example g of the whole is the next of lane g mod L. So the place of a lane is a shard of the
row and the byte at which its buffer begins, and a buffer that was half used is filled again with what is left
of it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache

import torch

from roundtable.client.streams.tar_records import Record
from roundtable.client.streams.tar_shards import TarShards
from roundtable.core.errors import NoExamples, TaskError
from roundtable.core.seeds import derive_seed, torch_generator


@dataclass(frozen=True)
class LanePlace:
    """Where a lane's buffer begins: `shard` counts along the endless row, `offset` in bytes of its tar
    stream."""

    shard: int
    offset: int


@dataclass(frozen=True)
class StreamSeed:
    """Whose order it is: the job's seed and the client's name."""

    seed: int
    client: str

    def of(self, *path: str | int) -> torch.Generator:
        """A generator of the stream of chance that `path` names."""
        return torch_generator(self.seed, self.client, "stream", *path)

    def number(self, *path: str | int) -> int:
        """A seed of the stream of chance that `path` names."""
        return derive_seed(self.seed, self.client, "stream", *path)


class Lane:
    """One lane's records from a place on; it reads those that are its own share's: of (part, parts)."""

    def __init__(
        self,
        source: TarShards,
        seed: StreamSeed,
        number: int,
        place: LanePlace,
        count: int,
        share: tuple[int, int],
    ) -> None:
        """`count` examples of the lane were taken before, some of them perhaps from the buffer at `place`."""
        self.place = place
        self._source = source
        self._seed = seed
        self._number = number
        self._count = count
        self._share = share
        self._buffer: list[Record | None] = []
        self._order: list[int] = []
        self._wanted: list[bool] = []
        self._records = self._read(place)
        self._next = place

    def take(self) -> Record | None:
        """The lane's next record; None where it belongs to another share."""
        block, inside = divmod(self._count, self._source.block)
        if not self._buffer:
            self._fill(block, inside)
        record, self._buffer[self._order[inside]] = self._buffer[self._order[inside]], None
        self._count += 1
        if inside + 1 == self._source.block:
            self._buffer, self.place = [], self._next
        return record

    def close(self) -> None:
        """Closes the shard that is being read."""
        self._records.close()

    def _fill(self, block: int, taken: int) -> None:
        size = self._source.block
        part, parts = self._share
        self._order = torch.randperm(size, generator=self._seed.of("records", self._number, block)).tolist()
        wanted = [False] * size
        for inside, place in enumerate(self._order):
            wanted[place] = inside >= taken and (block * size + inside) % parts == part
        self._wanted = wanted[::-1]
        for _ in range(size):
            shard, record = next(self._records)
            self._buffer.append(record if record.sample is not None else None)
        step = self._source.lanes
        self._next = LanePlace(shard + step, 0) if record.end is None else LanePlace(shard, record.end)

    def _read(self, place: LanePlace) -> Generator[tuple[int, Record], None, None]:
        shard, offset = place.shard, place.offset
        empty: set[int] = set()
        while True:
            actual = shard_at(self._seed, len(self._source.urls), shard)
            record = None
            for record in self._source.records(actual, offset, lambda: self._wanted.pop()):
                yield shard, record
            if record is None and offset:
                raise TaskError(
                    f"shard {actual + 1} of {len(self._source.urls)} of the training data has changed: it "
                    "ends before the place up to which it was read; keep shards as they are while a job runs"
                )
            if record is None:
                empty.add(actual)
                if len(empty) == len(self._source.urls):
                    raise NoExamples(f"the {len(empty)} shards of the training data hold no record")
            shard, offset = shard + self._source.lanes, 0


def shard_at(seed: StreamSeed, count: int, place: int) -> int:
    """Which of `count` shards stands at a place of the endless row."""
    epoch, inside = divmod(place, count)
    return _permutation(seed, count, epoch)[inside]


@lru_cache(maxsize=64)
def _permutation(seed: StreamSeed, count: int, epoch: int) -> tuple[int, ...]:
    return tuple(torch.randperm(count, generator=seed.of("shards", epoch)).tolist())
