"""Data that can only be iterated, once and in parts: those who share an evaluation read each its own.

A part's examples make up batches of their own, so that they are the same whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

from roundtable.client.streams.iterables import from_the_beginning
from roundtable.client.streams.random_state import DataRandomness, seed_generators
from roundtable.client.streams.shares import ReadingShare
from roundtable.client.streams.tar_shards import TarShards
from roundtable.core.seeds import derive_seed

# Of a data set that others can divide; tar shards say themselves in how many lanes they are read.
_MOST_PARTS = 8
# Batches of a part are numbered from its own multiple of this on.
_PLACES = 1 << 32

Wanted = Callable[[int], bool]


class PartBatch(NamedTuple):
    """A batch's examples, and its place among those of all parts."""

    place: int
    examples: list[Any]


def batches_in_parts(
    dataset: Any, batch_size: int, share: ReadingShare, seed: int | None
) -> Iterator[PartBatch]:
    """The batches of this share, one part after the other; of a part with several sharers each `sharers`th.

    Tar shards are divided by shards, a data set with `num_shards` and `shard(num_shards, index)`, as Hugging
    Face names them, by those. Any other is one part: whoever shares it iterates over all of it. What the data
    draw follows from `seed`, whoever reads; without one from the global generators.
    """
    parts = _parts(dataset, seed)
    for number in share.lanes(len(parts)):
        mine, sharers = share.turn(number, len(parts))
        randomness = None if seed is None else DataRandomness(derive_seed(seed, "part", number))
        examples = parts[number](partial(_is_turn, batch_size, mine, sharers))
        for place in range(_PLACES):
            if randomness is None:
                batch = list(islice(examples, batch_size))
            else:
                with randomness:
                    batch = list(islice(examples, batch_size))
            if not batch:
                break
            if place % sharers == mine:
                yield PartBatch(number * _PLACES + place, batch)


def _is_turn(batch_size: int, mine: int, sharers: int, index: int) -> bool:
    return index // batch_size % sharers == mine


def _parts(dataset: Any, seed: int | None) -> list[Callable[[Wanted], Iterator[Any]]]:
    """What reads each part, given which of its examples are wanted; others may come as None."""
    if isinstance(dataset, TarShards):
        return [partial(_of_shards, dataset, lane, seed) for lane in range(dataset.lanes)]
    shards = getattr(dataset, "num_shards", None)
    if callable(getattr(dataset, "shard", None)) and isinstance(shards, int) and shards > 1:
        divided = min(shards, _MOST_PARTS)
        return [partial(_of_divided, dataset, divided, index) for index in range(divided)]
    return [partial(_of_divided, dataset, 1, 0)]


def _of_shards(source: TarShards, lane: int, seed: int | None, wanted: Wanted) -> Iterator[Any]:
    """A row of neighbouring shards; of records that are not wanted the bytes are passed over."""
    shards, asked, index = len(source.urls), count(), 0
    for shard in range(lane * shards // source.lanes, (lane + 1) * shards // source.lanes):
        for record in source.records(shard, 0, lambda: wanted(next(asked))):
            if record.sample is not None and seed is not None:
                seed_generators(derive_seed(seed, "decode", lane, index))
            yield None if record.sample is None else source.decoded(record)
            index += 1


def _of_divided(dataset: Any, divided: int, index: int, wanted: Wanted) -> Iterator[Any]:
    del wanted  # It gives each example or ends.
    return from_the_beginning(dataset if divided == 1 else dataset.shard(num_shards=divided, index=index))
