"""A round's batches of a client, and what it keeps of a stream so that the next round goes on there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from roundtable.client.batch_tensors import moved
from roundtable.client.streams.kept_position import NAME, kept_position, position_tensor
from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.readers import StreamReader, make_reader
from roundtable.client.training.batches import (
    Batch,
    count_examples,
    ordering_of,
    steps_of_stream,
    training_batches,
)
from roundtable.client.training.loaders import Collate, base_of, check_loader, collate_of
from roundtable.client.training.local_work import LocalWork


class RoundBatches:
    """The batches of a client's round, to be iterated over once.

    Those of a map-style data set are `training_batches`. Those of a stream are all full, across the ends of
    epochs, and go on where the round before stopped.
    """

    def __init__(self, data: Any, work: LocalWork, device: torch.device | None) -> None:
        """Raises TaskError for a stream without a number of steps, or with a position in other data."""
        self._data = data
        self._work = work
        self._device = device
        self._reader: StreamReader | None = None
        if count_examples(data) is None:
            check_loader(data, work.job.algorithm.batch_size)
            steps_of_stream(base_of(data), work.job.algorithm.steps)
            self._reader = make_reader(
                data, StreamSeed(work.job.seed, work.client), kept_position(work.local)
            )

    def __iter__(self) -> Iterator[Batch]:
        if self._reader is not None:
            table = self._work.job.algorithm
            collate = collate_of(self._data)
            return streamed(self._reader, collate, table.batch_size, table.steps or 0, self._device)
        ordering = ordering_of(self._work.job, self._work.round, self._work.client)
        return training_batches(self._data, **ordering, device=self._device)

    def kept(self) -> dict[str, Tensor]:
        """What the client keeps of it once all batches are taken."""
        return {} if self._reader is None else {NAME: position_tensor(self._reader.position())}


def streamed(
    reader: StreamReader, collate: Collate, batch_size: int, steps: int, device: torch.device | None
) -> Iterator[Batch]:
    """So many batches from where the reader stands, each full: an epoch may end within one."""
    try:
        for _ in range(steps):
            examples = reader.take(batch_size)
            yield Batch(reader.epoch, len(examples), moved(collate(examples), device))
    finally:
        reader.close()
