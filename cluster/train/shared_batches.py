"""Shares out the batches that one process would take: the same examples at any world size."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from roundtable.client.training.batches import as_tensors, batches_of, count_examples, training_orders
from roundtable.client.training.loaders import (
    WantedRows,
    base_of,
    check_loader,
    collate_of,
    drops_last,
    read_ahead,
    read_rows,
)
from roundtable.cluster.stepping.rank_shares import cut_by_shares
from roundtable.core.seeds import derive_seed, torch_generator


@dataclass(frozen=True)
class Share:
    """One step's micro-batches of a rank: `sizes` in examples, 0 for a filler that keeps ranks in step.

    `total` counts the examples of the whole step over all ranks, `together` those of the ranks that share
    their gradients with this one: 0 where they have none.
    """

    batches: list[Any]
    sizes: list[int]
    total: int
    together: int


@dataclass(frozen=True)
class Sharing:
    """This rank's part of each batch, and how it is cut; `apart` counts replicas that share no gradients.

    `shares` are those of ranks that need not run as many micro-batches as others; equal ones without.
    """

    rank: int
    ranks: int
    micro_batch: int
    pipeline: int = 1
    interleaved: bool = False
    apart: int = 1
    shares: tuple[float, ...] | None = None


class SharedBatches:
    """A round's steps; the position is the number of steps taken, the same at any world size."""

    def __init__(
        self,
        dataset: Any,
        sharing: Sharing,
        *,
        batch_size: int,
        stream: tuple[int, int, str],
        epochs: int = 1,
        steps: int | None = None,
    ) -> None:
        """`stream` is (seed, round, client): the order follows from it, as `training_orders` says.

        Raises what `training_orders` raises, and TaskError for a DataLoader that batches otherwise than the
        job.
        """
        check_loader(dataset, batch_size)
        generator = torch_generator(*stream, "batches")
        self._orders = training_orders(
            dataset, batch_size=batch_size, generator=generator, epochs=epochs, steps=steps
        )
        self.examples = count_examples(dataset) or 0
        self._dataset = dataset
        self._sharing = self._own = sharing
        self._batch_size = batch_size
        self._stream = stream
        own = epochs * batches_of(self.examples, batch_size, drop_last=drops_last(dataset))
        self.steps = own if steps is None else steps
        self.position = 0

    def share_among(self, place: int, replicas: int) -> None:
        """From the next step on this rank's group is one, at `place`, of so many that share a batch."""
        own = self._own
        rank, ranks = place * own.ranks + own.rank, replicas * own.ranks
        self._sharing = replace(own, rank=rank, ranks=ranks, apart=replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after `position` steps."""
        self.position = state["position"]

    def place(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Rounds begin anew with such data: nothing but the step has to be known."""

    def __iter__(self) -> Generator[Share]:
        """Yields the steps that are left; processes that read ahead end with the generator."""
        left = islice(self._rows(), self.position, None)
        if isinstance(self._dataset, DataLoader) and self._dataset.num_workers:
            yield from self._ahead(self._dataset, left)
            return
        for rows in left:
            cut = self._cut(rows)
            batches = [gather(self._dataset, part) for part, _ in cut.parts]
            self.position += 1
            yield cut.share(batches)

    def _ahead(self, loader: DataLoader[Any], left: Iterator[Tensor]) -> Iterator[Share]:
        """The steps as the loader's processes read them, which begin anew where they are shared otherwise."""
        asked: deque[tuple[Tensor, _Cut]] = deque()
        while True:
            sharing = self._sharing
            left = chain([rows for rows, _ in asked], left)
            asked.clear()
            seed = derive_seed(*self._stream, "workers", self.position)
            with closing(read_ahead(loader, self._wanted(left, asked), seed)) as read:
                for batches in read:
                    _, cut = asked.popleft()
                    self.position += 1
                    yield cut.share(batches)
                    if self._sharing is not sharing:
                        break
                else:
                    return

    def _wanted(self, left: Iterator[Tensor], asked: deque[tuple[Tensor, _Cut]]) -> Iterator[WantedRows]:
        for step, rows in enumerate(left, self.position + 1):
            cut = self._cut(rows)
            asked.append((rows, cut))
            seed = step_seed(self._stream, "data", step, self._sharing.rank)
            yield WantedRows([part.tolist() for part, _ in cut.parts], seed)

    def _rows(self) -> Iterator[Tensor]:
        """Yields the row numbers of each step, as one process would take them."""
        for order in self._orders:
            yield from torch.split(order, self._batch_size)

    def _cut(self, rows: Tensor) -> _Cut:
        sharing = self._sharing
        if sharing.shares is not None:
            parts: Sequence[Tensor] = torch.split(rows, cut_by_shares(len(rows), sharing.shares))
        else:
            parts = rows.tensor_split(sharing.ranks)
        own, near = parts[sharing.rank], sharing.ranks // sharing.apart
        first = sharing.rank // near * near
        together = sum(len(part) for part in parts[first : first + near])
        most = max(1, len(own)) if sharing.shares is not None else -(-len(rows) // sharing.ranks)
        if sharing.pipeline > 1:
            cut = _equal(own, rows, sharing, {len(part) for part in parts})
        else:
            cut = _ragged(own, rows, sharing, most)
        return _Cut(cut, len(rows), together)


class _Cut(NamedTuple):
    """A step's micro-batches of a rank as (rows, size), and the counts of its `Share`."""

    parts: list[tuple[Tensor, int]]
    total: int
    together: int

    def share(self, batches: list[Any]) -> Share:
        return Share(batches, [size for _, size in self.parts], self.total, self.together)


def step_seed(stream: tuple[int, int, str], purpose: str, step: int, rank: int) -> int:
    """The seed of a rank's step: alike on ranks with the same examples, and when the step is done again."""
    return derive_seed(*stream, purpose, step, rank)


def _ragged(own: Tensor, rows: Tensor, sharing: Sharing, most: int) -> list[tuple[Tensor, int]]:
    """Cuts into as many micro-batches on every rank, since ranks meet after each; fillers have no weight."""
    count = -(-most // sharing.micro_batch)
    parts = [(part, len(part)) for part in torch.split(own, sharing.micro_batch) if len(part)]
    return parts + [(rows[:1], 0)] * (count - len(parts))


def _equal(own: Tensor, rows: Tensor, sharing: Sharing, lengths: Collection[int]) -> list[tuple[Tensor, int]]:
    """Cuts into micro-batches of one size, as many as the pipeline's schedule takes.

    As many on every rank, whose shares are of these `lengths`: those that share experts meet in each.
    """
    size = _even(len(own), sharing.micro_batch)
    count = max(sharing.pipeline, *(-(-length // _even(length, sharing.micro_batch)) for length in lengths))
    if sharing.interleaved:
        count = -(-count // sharing.pipeline) * sharing.pipeline
    parts = [(part, len(part)) for part in torch.split(own, size) if len(part)]
    return parts + [(rows[:1].expand(size), 0)] * (count - len(parts))


def _even(length: int, most: int) -> int:
    """The largest size of micro-batches, up to `most`, that leaves none of `length` examples over."""
    length = max(length, 1)
    return max(size for size in range(1, min(most, length) + 1) if length % size == 0)


def gather(dataset: Any, rows: Tensor) -> Any:
    """These examples of a data set as one batch on CPU."""
    tensors = as_tensors(dataset)
    if tensors is not None:
        return tuple(tensor.index_select(0, rows) for tensor in tensors)
    base = base_of(dataset)
    return read_rows(base, collate_of(dataset), rows.tolist())
