"""Shares out streamed data over ranks: each step's examples are those of one process, at any world size."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

import torch.distributed as dist

from roundtable.client.streams.kept_position import Position
from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.readers import StreamReader, make_reader
from roundtable.client.streams.shard_reader import merged
from roundtable.client.streams.shares import ReadingShare
from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.training.batches import steps_of_stream
from roundtable.client.training.loaders import base_of, check_loader, collate_of
from roundtable.cluster.parallel.meshes import gather_text
from roundtable.cluster.plan.model_probe import NOT_STREAMED
from roundtable.cluster.train.shared_batches import Share, Sharing
from roundtable.core.errors import TaskError

# Steps whose place is remembered: one is taken ahead, and a loss that jumps asks for the one before.
_REMEMBERED = 4


class StreamedBatches:
    """A round's steps over a stream, from where the silo's last round stopped.

    A rank reads its own share of tar shards; of another iterable data set every rank reads all, and keeps its
    own. `examples` are those of the round.
    """

    def __init__(
        self,
        dataset: Any,
        sharing: Sharing,
        *,
        batch_size: int,
        steps: int | None,
        seed: StreamSeed,
        start: Position | None = None,
    ) -> None:
        """Raises TaskError for a job without steps, for pipelines, and for a start in other data."""
        check_loader(dataset, batch_size)
        self.steps = steps_of_stream(base_of(dataset), steps)
        if sharing.pipeline > 1:
            raise TaskError(f"no pipeline: {NOT_STREAMED}")
        self._dataset = dataset
        self._sharing = sharing
        self._batch_size = batch_size
        self._seed = seed
        self._places = {0: start}
        self.position = 0
        self.examples = batch_size * self.steps

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after `position` steps of the round, at the place in the data that `stream` is."""
        self.position = state["position"]
        self._places = {self.position: state["stream"]}

    def own_place(self, step: int) -> Position | None:
        """What this rank knows of the place after one of the last steps."""
        return self._places[step]

    def place(self, step: int, group: dist.ProcessGroup | None) -> Position | None:
        """Where the reading of all ranks stood after one of the last steps. Collective over a CPU group."""
        own = json.dumps(self.own_place(step))
        places = [json.loads(text) for text in gather_text(own, group)]
        return None if places[0] is None else merged(places)

    def __iter__(self) -> Generator[Share]:
        """Yields the steps that are left."""
        share = ReadingShare(self._sharing.rank, self._sharing.ranks)
        reader = make_reader(self._dataset, self._seed, self._places[self.position], share)
        try:
            while self.position < self.steps:
                made = self._share(reader)
                self.position += 1
                self._places[self.position] = reader.position()
                self._places.pop(self.position - _REMEMBERED, None)
                yield made
        finally:
            reader.close()

    def _share(self, reader: StreamReader) -> Share:
        sharing = self._sharing
        counts = reader.counts(self._batch_size)
        own = reader.take(self._batch_size)
        near = sharing.ranks // sharing.apart
        first = sharing.rank // near * near
        together = sum(counts[first : first + near])
        size, count = sharing.micro_batch, -(-max(counts) // sharing.micro_batch)
        parts = [own[i : i + size] for i in range(0, len(own), size)]
        sizes = [len(part) for part in parts] + [0] * (count - len(parts))
        parts += [[own[0] if own else reader.filler()]] * (count - len(parts))
        collate = collate_of(self._dataset)
        return Share([collate(part) for part in parts], sizes, self._batch_size, together)


def why_shared(dataset: Any, ranks: int) -> str:
    """Why ranks read the same shards, in words; "" where each has shards of its own."""
    source = base_of(dataset)
    if not isinstance(source, TarShards) or ranks <= source.lanes:
        return ""
    few = len(source.urls) == source.lanes
    remedy = f"make at least {ranks} shards" if few else f"set lanes = {ranks} of TarShards"
    return (
        f"{ranks} ranks share {source.lanes} lanes of the training data, so some pass over the bytes of each "
        f"other's records: {remedy}"
    )
