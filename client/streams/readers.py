"""Reads training data that can only be iterated: the examples of each step, and where the reading stands."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils.data import DataLoader

from roundtable.client.streams.iterables import IterableReader
from roundtable.client.streams.kept_position import Position
from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.shard_reader import ShardReader
from roundtable.client.streams.shares import WHOLE, ReadingShare
from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.streams.workers import Workers


class StreamReader(Protocol):
    """Gives a data set's examples without an end, epoch after epoch, to one of those that share the
    reading."""

    @property
    def epoch(self) -> int:
        """The epoch, from 1, that the reading is in."""

    def counts(self, examples: int) -> list[int]:
        """How many of the next `examples` each of those who share the reading takes."""

    def take(self, examples: int) -> list[Any]:
        """This share's part of the next `examples`, in order."""

    def filler(self) -> Any:
        """Any example, for one of those who share the reading that has none in a step but computes with
        them."""

    def position(self) -> Position:
        """Where the reading stands; with shares, what this one knows of it."""

    def close(self) -> None:
        """Lets go of files; nothing can be taken any more."""


def lanes_of(dataset: Any) -> int:
    """In how many lanes a data set's examples are dealt out; 0 where they are shared out evenly."""
    source = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    return source.lanes if isinstance(source, TarShards) else 0


def make_reader(
    dataset: Any, seed: StreamSeed, position: Position | None, share: ReadingShare = WHOLE
) -> StreamReader:
    """A reader of an iterable data set, or of a DataLoader over one, that goes on from a position, or begins.

    Raises TaskError for a position in other data."""
    workers = Workers()
    if isinstance(dataset, DataLoader):
        dataset, workers = dataset.dataset, Workers.of(dataset)
    if isinstance(dataset, TarShards):
        return ShardReader(dataset, seed, position, share, workers)
    return IterableReader(dataset, seed, position, share, workers)
