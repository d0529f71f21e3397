"""A silo's data set as batches: the order is seeded, the last partial batch is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from roundtable.client.batch_tensors import examples_in, moved
from roundtable.client.streams.shares import WHOLE, ReadingShare
from roundtable.client.streams.stream_parts import batches_in_parts
from roundtable.client.training.loaders import (
    DrawnByBatch,
    InitialisedBeneath,
    base_of,
    check_loader,
    collate_of,
    drops_last,
    for_workers,
    own_sampler,
    sampled_order,
    workers_of,
)
from roundtable.core.config import JobConfig
from roundtable.core.errors import NoExamples, RoundtableError, TaskError
from roundtable.core.seeds import derive_seed, torch_generator

# Above this an epoch's shuffled copy would cost more memory than gathering each batch costs time.
_COPY_LIMIT_BYTES = 256 << 20
T = TypeVar("T")


class Batch(NamedTuple):
    """What `Task.loss` gets, and where it stands: `epoch` from 1, `size` in examples, `place` among all of an
    evaluation."""

    epoch: int
    size: int
    data: Any
    place: int = 0


class Ordering(TypedDict):
    """What decides which examples are in which batch, as `training_batches` and `epoch_orders` take it."""

    batch_size: int
    generator: torch.Generator
    epochs: int
    steps: int | None


def ordering_of(job: JobConfig, round: int, client: str) -> Ordering:
    """A client's in a round, wherever it trains: by the stream (seed, round, client, "batches")."""
    table, generator = job.algorithm, torch_generator(job.seed, round, client, "batches")
    return Ordering(batch_size=table.batch_size, generator=generator, epochs=table.passes, steps=table.steps)


def as_tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a tuple of tensors or arrays, or of a TensorDataset; None for another kind of data set.

    Raises TaskError where their lengths differ, or where a tuple holds something else.
    """
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if not isinstance(dataset, (tuple, list)):
        return None
    if not dataset or not all(isinstance(part, (Tensor, np.ndarray)) for part in dataset):
        kinds = ", ".join(type(part).__name__ for part in dataset[:4]) or "nothing"
        raise TaskError(
            f"a data set given as a {type(dataset).__name__} must hold tensors of equal length, "
            f"not {kinds}; return tensors or a map-style torch Dataset from data()"
        )
    tensors = tuple([part if isinstance(part, Tensor) else torch.as_tensor(part) for part in dataset])
    lengths = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    if lengths.count(lengths[0]) != len(lengths) or lengths[0] is None:
        raise TaskError(f"the tensors of a data set must have equal lengths, not {lengths}")
    return tensors


def count_examples(dataset: Any) -> int | None:
    """How many examples a data set holds; None where only iterating would tell."""
    if dataset is None:
        return 0
    tensors = as_tensors(dataset)
    if tensors is not None:
        return len(tensors[0])
    if isinstance(dataset, DataLoader):
        return _count_loaded(dataset)
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)
    except TypeError as error:
        raise TaskError(
            f"data() returned a {type(dataset).__name__}; it must return (train, test): tuples of tensors or "
            "map-style torch Datasets"
        ) from error


def _count_loaded(loader: DataLoader[Any]) -> int | None:
    examples = count_examples(loader.dataset)
    sampler = own_sampler(loader)
    if examples is None or sampler is None:
        return examples
    try:
        return len(sampler)
    except TypeError as error:
        raise TaskError(
            f"{type(sampler).__name__} has no length, so nobody knows how long an epoch is; give it a __len__"
        ) from error


def training_batches(
    dataset: Any,
    *,
    batch_size: int,
    generator: torch.Generator,
    epochs: int = 1,
    steps: int | None = None,
    device: torch.device | None = None,
) -> Iterator[Batch]:
    """Shuffled batches of so many epochs, or exactly `steps` batches over as many epochs as that takes.

    Raises NoExamples for an empty data set, TaskError for a DataLoader that batches otherwise than the job.
    """
    check_loader(dataset, batch_size)
    orders = training_orders(dataset, batch_size=batch_size, generator=generator, epochs=epochs, steps=steps)
    return chain.from_iterable(
        _epoch(dataset, order, epoch, batch_size, device, generator) for epoch, order in enumerate(orders, 1)
    )


def training_orders(
    dataset: Any, *, batch_size: int, generator: torch.Generator, epochs: int = 1, steps: int | None = None
) -> Iterator[Tensor]:
    """The rows of each epoch's batches: each epoch one `torch.randperm` of `generator`, or as a sampler says.

    Raises NoExamples for a data set that gives no batch, TaskError for one that can only be iterated.
    """
    examples = count_examples(base_of(dataset))
    if examples is None:
        raise TaskError(f"{type(base_of(dataset)).__name__} can only be iterated: it is read as a stream")
    if examples == 0 or count_examples(dataset) == 0:
        raise NoExamples("the training data set is empty: there are zero examples to learn from")
    sampler, drop = own_sampler(dataset), drops_last(dataset)
    draw: Callable[[], Tensor] = partial(torch.randperm, examples, generator=generator)
    if sampler is not None:
        draw = partial(sampled_order, sampler, examples, generator)
    if drop and (count_examples(dataset) or 0) < batch_size:
        raise NoExamples(
            f"drop_last leaves out the only batch, as there are fewer examples than batch_size = {batch_size}"
        )
    return _orders(draw, drop, batch_size=batch_size, epochs=epochs, steps=steps)


def steps_of_stream(dataset: Any, steps: int | None) -> int:
    """The steps of a round over a stream. Raises TaskError where the job does not say how many."""
    if steps is None:
        raise TaskError(
            f"{type(dataset).__name__} can only be iterated, so an epoch has no stated length: set "
            "[algorithm] steps in the job, or return a map-style data set"
        )
    return steps


def ordered_batches(
    dataset: Any,
    batch_size: int,
    device: torch.device | None = None,
    *,
    share: ReadingShare = WHOLE,
    seed: int | None = None,
) -> Iterator[Batch]:
    """The data set once, in its own order; nothing for an empty one or None.

    Of a `share` those batches that are its own, the same ones as without sharing, and nothing else is read:
    each `ranks`th, or of a stream as `batches_in_parts` says. What the data set draws while a batch is read
    follows from `seed`, whoever reads it; without one from the global generators.
    """
    examples = count_examples(dataset)
    tensors = as_tensors(dataset) if examples else None
    if examples is None:
        collate = collate_of(dataset)
        for place, part in batches_in_parts(base_of(dataset), batch_size, share, seed):
            yield Batch(1, len(part), moved(collate(part), device), place)
        return
    places = range(share.rank, batches_of(examples, batch_size), share.ranks)
    if tensors is not None:
        for place in places:
            start = place * batch_size
            # A copy, for a task may change its batch.
            parts = (
                t[start : start + batch_size].clone(memory_format=torch.contiguous_format) for t in tensors
            )
            size = min(batch_size, examples - start)
            yield Batch(1, size, tuple(moved(part, device) for part in parts), place)
    elif examples:
        rows, sampler = count_examples(base_of(dataset)) or 0, own_sampler(dataset)
        order = torch.arange(rows)
        if sampler is not None:
            order = sampled_order(sampler, rows, torch.Generator())
        taken = [part.tolist() for part in torch.split(order, batch_size)][share.rank :: share.ranks]
        for place, batch in enumerate(_loaded(dataset, taken, 1, device, seed=seed)):
            yield batch._replace(place=share.rank + place * share.ranks)


def asking(batches: Iterable[T], before: Callable[[], None] | None) -> Iterator[T]:
    """The same batches; `before` is called once each is there, before it is given, and may raise."""
    for batch in batches:
        if before is not None:
            before()
        yield batch


def batches_of(examples: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Batches of an epoch over so many examples."""
    return examples // batch_size if drop_last else -(-examples // batch_size)


def epoch_orders(
    examples: int, *, batch_size: int, generator: torch.Generator, epochs: int = 1, steps: int | None = None
) -> Iterator[Tensor]:
    """The order of rows in each epoch over so many shuffled examples, int64; the last may end early."""
    draw = partial(torch.randperm, examples, generator=generator)
    return _orders(draw, False, batch_size=batch_size, epochs=epochs, steps=steps)


def _orders(
    draw: Callable[[], Tensor], drop_last: bool, *, batch_size: int, epochs: int, steps: int | None
) -> Iterator[Tensor]:
    left = math.inf if steps is None else steps
    while left > 0 and (steps is not None or epochs > 0):
        order = draw()
        if drop_last:
            order = order[: len(order) // batch_size * batch_size]
        if not len(order):
            raise NoExamples("the sampler of the training data gave no batch in an epoch")
        if left * batch_size < len(order):
            order = order[: int(left) * batch_size]
        yield order
        left -= -(-len(order) // batch_size)
        epochs -= 1


def _epoch(
    dataset: Any,
    order: Tensor,
    epoch: int,
    batch_size: int,
    device: torch.device | None,
    generator: torch.Generator | None = None,
) -> Iterator[Batch]:
    tensors = as_tensors(dataset)
    if tensors is None:
        rows = [part.tolist() for part in torch.split(order, batch_size)]
        yield from _loaded(dataset, rows, epoch, device, generator)
        return
    if sum(tensor.nbytes for tensor in tensors) <= _COPY_LIMIT_BYTES:
        copies = [moved(tensor.index_select(0, order), device) for tensor in tensors]
        for parts in zip(*(torch.split(copy, batch_size) for copy in copies), strict=True):
            yield Batch(epoch, len(parts[0]), parts)
    else:
        for places in torch.split(order, batch_size):
            parts = tuple(moved(tensor.index_select(0, places), device) for tensor in tensors)
            yield Batch(epoch, len(places), parts)


def _loaded(
    dataset: Any,
    rows: list[list[int]],
    epoch: int,
    device: torch.device | None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> Iterator[Batch]:
    """These batches, loaded as the data set's own DataLoader does, if it has one."""
    # The loader would otherwise draw its base seed from the global generator; workers are seeded with it.
    seeds = torch.Generator()
    if (workers := workers_of(dataset)) and generator is not None:
        seeds.manual_seed(derive_seed(generator.initial_seed(), "workers", epoch))
    source = for_workers(dataset) if workers else base_of(dataset)
    if seed is not None:
        source = DrawnByBatch(source, seed)
        if workers:
            workers["worker_init_fn"] = InitialisedBeneath(workers["worker_init_fn"])
    loader = DataLoader(
        source,
        batch_sampler=rows,
        collate_fn=collate_of(dataset),
        generator=seeds,
        **workers,
    )
    try:
        for data in loader:
            yield Batch(epoch, examples_in(data), moved(data, device))
    except RoundtableError as error:
        if not workers:
            raise
        # torch puts a worker's traceback into the message, which may leave the silo.
        raise TaskError(
            f"the data set raised {type(error).__name__} in a process of its DataLoader (the silo's log "
            "has the details)"
        ) from error
