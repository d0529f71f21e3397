"""The order of shards and records: drawn from the job's seed, the same for one process and any number of
ranks.

All epochs' permutations of the shards, one behind the other, are an endless row; lane l of L reads every L-th
of it from l on. It fills a buffer with its next b records, gives them in an order drawn for that buffer, and
fills it anew. Example g of the whole is the next of lane g mod L. So the place of a lane is a shard of the
row and the byte at which its buffer begins, and a buffer that was half used is filled again with what is left
of it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from roundtable.client.streams.shard_marks import ShardMark
from roundtable.client.streams.tar_records import Record
from roundtable.client.streams.tar_shards import TarShards
from roundtable.core.errors import NoExamples, TaskError
from roundtable.core.seeds import derive_seed, torch_generator

MOST_MARKS = 2

log = logging.getLogger("roundtable.worker")


@dataclass(frozen=True)
class LanePlace:
    """Where a lane's buffer begins: `shard` counts along the endless row, `offset` in bytes of its tar
    stream. `marks` are what this shard and the lane's next ones were known by when the buffer was filled:
    of `MOST_MARKS` at most, and of none that nothing was read of."""

    shard: int
    offset: int
    marks: tuple[ShardMark, ...] = ()


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
        self._met: dict[int, ShardMark] = {}
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
        held = range(self.place.shard, shard + 1, step)[:MOST_MARKS]
        self.place = replace(self.place, marks=tuple(self._met[each] for each in held))
        self._met = {shard: self._met[shard]}
        if record.end is None:
            self._next = LanePlace(shard + step, 0)
        else:
            self._next = LanePlace(shard, record.end, (self._met[shard],))

    def _read(self, place: LanePlace) -> Generator[tuple[int, Record], None, None]:
        shard, offset, before = place.shard, place.offset, list(place.marks)
        empty: set[int] = set()
        while True:
            actual = shard_at(self._seed, len(self._source.urls), shard)
            record = None
            meet = partial(self._meet, shard, actual, before.pop(0) if before else None)
            for record in self._source.records(actual, offset, lambda: self._wanted.pop(), meet):
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

    def _meet(self, place: int, shard: int, before: ShardMark | None, now: ShardMark) -> None:
        """Compares a shard that was read in part with the file that is there now."""
        self._met[place] = now
        if before is None:
            return
        if before.other_size(now):
            raise TaskError(
                f"has changed: it has {now.size:,} bytes, and had {before.size:,} when a part of it was "
                "read; bring that file back, and keep shards as they are while a job runs"
            )
        if before.written_again(now):
            log.warning(
                "shard %d of %d of the training data, %s, was written again since a part of it was read: the "
                "job goes on in what it holds now",
                shard + 1,
                len(self._source.urls),
                self._source.urls[shard],
            )


def shard_at(seed: StreamSeed, count: int, place: int) -> int:
    """Which of `count` shards stands at a place of the endless row."""
    epoch, inside = divmod(place, count)
    return _permutation(seed, count, epoch)[inside]


@lru_cache(maxsize=64)
def _permutation(seed: StreamSeed, count: int, epoch: int) -> tuple[int, ...]:
    return tuple(torch.randperm(count, generator=seed.of("shards", epoch)).tolist())
