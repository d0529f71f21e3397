"""Shares out streamed data, tar shards or any iterable, over ranks, with a position to go on from."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate
from typing_extensions import override

from roundtable.client.training.batches import NoExamples
from roundtable.cluster.train.shared_batches import Share, Sharing
from roundtable.core.errors import TaskError

Sample = dict[str, bytes]


class TarShards(IterableDataset[Any]):
    """Samples of tar files in the WebDataset manner: files of one name before the first dot are one sample.

    `decode` makes an example of {extension: bytes}. Archives are read in order, one member at a time.
    """

    def __init__(self, paths: Sequence[Path], decode: Callable[[Sample], Any]) -> None:
        self._paths = list(paths)
        self._decode = decode

    @override
    def __iter__(self) -> Iterator[Any]:
        for path in self._paths:
            with tarfile.open(path, "r|*") as archive:
                yield from map(self._decode, _samples(archive))


class StreamedBatches:
    """A round's steps over an iterable data set: the batches that one process would take, shared out.

    Every rank reads the stream and keeps its own examples, so the order is the same at any world size. The
    stream begins anew when it ends; going on skips what earlier steps took.
    """

    def __init__(self, dataset: Any, sharing: Sharing, *, batch_size: int, steps: int | None) -> None:
        if steps is None:
            raise TaskError(
                f"{type(dataset).__name__} can only be iterated, so an epoch has no stated length: set "
                "[algorithm] steps in the job, or return a map-style data set"
            )
        if sharing.pipeline > 1:
            raise TaskError("a pipeline needs a map-style data set: its micro-batches have one size")
        self._dataset = dataset
        self._sharing = sharing
        self._batch_size = batch_size
        self.steps = steps
        self.position = 0
        self.examples = batch_size * steps

    def state_dict(self) -> dict[str, int]:
        """The position, in steps taken."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the steps of `state`."""
        self.position = state["position"]

    def __iter__(self) -> Iterator[Share]:
        """Yields the steps that are left."""
        stream = self._forever()
        for _ in islice(stream, self.position * self._batch_size):
            pass
        while self.position < self.steps:
            share = self._share(list(islice(stream, self._batch_size)))
            self.position += 1
            yield share

    def _forever(self) -> Iterator[Any]:
        while True:
            empty = True
            for example in self._dataset:
                empty = False
                yield example
            if empty:
                raise NoExamples(f"the training stream {type(self._dataset).__name__} gave no example")

    def _share(self, examples: list[Any]) -> Share:
        sharing = self._sharing
        bounds = [round(i * len(examples) / sharing.ranks) for i in range(sharing.ranks + 1)]
        own = examples[bounds[sharing.rank] : bounds[sharing.rank + 1]]
        near = sharing.ranks // sharing.apart
        first = sharing.rank // near * near
        together = max(1, bounds[first + near] - bounds[first])
        most = max(after - before for before, after in pairwise(bounds))
        size, count = sharing.micro_batch, -(-most // sharing.micro_batch)
        parts = [own[i : i + size] for i in range(0, len(own), size)]
        sizes = [len(part) for part in parts] + [0] * (count - len(parts))
        parts += [examples[:1]] * (count - len(parts))
        return Share([default_collate(part) for part in parts], sizes, len(examples), together)


def _samples(archive: tarfile.TarFile) -> Iterator[Sample]:
    name, sample = "", Sample()
    for member in archive:
        if not member.isfile():
            continue
        folder, _, file = member.name.rpartition("/")
        stem, _, extension = file.partition(".")
        if sample and name != f"{folder}/{stem}":
            yield sample
            sample = Sample()
        name = f"{folder}/{stem}"
        content = archive.extractfile(member)
        assert content is not None
        sample[extension] = content.read()
    if sample:
        yield sample
