"""What a DataLoader that `data()` returns says of its data set: how to collate, who loads, which examples
when."""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from typing_extensions import override

from roundtable.client.streams.random_state import DataRandomness
from roundtable.client.streams.workers import ReadingProblem, as_it_is, told
from roundtable.core.errors import TaskError
from roundtable.core.machine.process_facts import die_with_parent
from roundtable.core.plugins.folder_imports import FilesFirst
from roundtable.core.seeds import derive_seed, isolated_randomness

Collate = Callable[[list[Any]], Any]
_CPU = torch.device("cpu")


def base_of(data: Any) -> Any:
    """The data set itself: that of a DataLoader, or what was given."""
    return data.dataset if isinstance(data, DataLoader) else data


def collate_of(data: Any) -> Collate:
    """What makes a batch of a list of examples."""
    if isinstance(data, DataLoader) and data.collate_fn is not None:
        return data.collate_fn
    return default_collate


def drops_last(data: Any) -> bool:
    """Whether the last batch of an epoch is left out where it is not full."""
    return isinstance(data, DataLoader) and bool(data.drop_last)


def workers_of(data: Any) -> dict[str, Any]:
    """A DataLoader's arguments about who loads, for another one over the same data set."""
    if not isinstance(data, DataLoader) or not data.num_workers:
        return {}
    return {
        "num_workers": data.num_workers,
        "prefetch_factor": data.prefetch_factor,
        "worker_init_fn": data.worker_init_fn,
        "multiprocessing_context": data.multiprocessing_context,
        "timeout": data.timeout,
    }


def for_workers(data: Any) -> Any:
    """The data set of a DataLoader for its workers, who know no task's file where they are no forks."""
    methods = multiprocessing.get_all_start_methods()
    method = multiprocessing.get_start_method(allow_none=True) or methods[0]
    if isinstance(data, DataLoader) and data.multiprocessing_context is not None:
        method = data.multiprocessing_context.get_start_method()
    return base_of(data) if method == "fork" else _Carried(base_of(data))


class _Carried(Dataset[Any]):
    """Is the data set itself again in the process that it is sent to."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[FilesFirst, Any]]:
        return _second, (FilesFirst(), self._dataset)


def _second(first: FilesFirst, dataset: Any) -> Any:
    return dataset


class DrawnByBatch(Dataset[Any]):
    """A data set that draws for each batch from a seed of its own, in whichever process it is read."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitems__(self, rows: list[int]) -> list[Any]:
        with DataRandomness(derive_seed(self._seed, "rows", len(rows), *rows[:1])):
            if (many := getattr(self.dataset, "__getitems__", None)) is not None:
                return list(many(rows))
            return [self.dataset[row] for row in rows]


class InitialisedBeneath:
    """A `worker_init_fn` over a data set of ours: what the worker calls its data set is the loader's own.

    The worker ends with the process that trains, where that is its parent: at once, also in an example.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own
        self._training = os.getpid()

    def __call__(self, worker: int) -> None:
        if os.getppid() == self._training:
            die_with_parent(self._training)
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # It lets nobody set it otherwise.
        if self._own is not None:
            self._own(worker)


@dataclass(frozen=True)
class WantedRows:
    """The rows of a step's batches, and the seed of what the data set draws while they are read."""

    batches: Sequence[Sequence[int]]
    seed: int


def read_rows(dataset: Any, collate: Collate, rows: Iterable[int]) -> Any:
    """These rows of a map-style data set as one batch. Errors of a row go on, with a note of which it was."""
    examples = []
    for row in rows:
        try:
            examples.append(dataset[row])
        except Exception as error:
            error.add_note(f"Example {row} of the training data was being read.")
            raise
    return collate(examples)


class _StepReader(Dataset[Any]):
    """Gives the batches of a step as one item, or the problem that there was."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self._collate = collate

    @override
    def __reduce__(self) -> tuple[Callable[..., _StepReader], tuple[FilesFirst, Any, Collate]]:
        return _step_reader, (FilesFirst(), self.dataset, self._collate)

    @override
    def __getitem__(self, wanted: WantedRows) -> list[Any] | ReadingProblem:
        try:
            with isolated_randomness(wanted.seed, _CPU):
                return [read_rows(self.dataset, self._collate, rows) for rows in wanted.batches]
        except Exception as error:  # noqa: BLE001 - a task is foreign code
            return ReadingProblem.of(error)


def _step_reader(first: FilesFirst, dataset: Any, collate: Collate) -> _StepReader:
    return _StepReader(dataset, collate)


def read_ahead(loader: DataLoader[Any], wanted: Iterable[WantedRows], seed: int) -> Generator[list[Any]]:
    """The batches of each step in turn, read by the loader's processes, which end with the iterator.

    `wanted` is asked for as many steps ahead as the processes read. `seed` is that of a process itself.
    Raises TaskError for what the data set raised.
    """
    steps: DataLoader[Any] = DataLoader(
        _StepReader(base_of(loader), collate_of(loader)),
        batch_size=None,
        sampler=wanted,
        collate_fn=as_it_is,
        generator=torch.Generator().manual_seed(seed),
        **{**workers_of(loader), "worker_init_fn": InitialisedBeneath(loader.worker_init_fn)},
    )
    yield from told(steps)


def check_loader(data: Any, batch_size: int) -> None:
    """Raises TaskError for a DataLoader that batches otherwise than the job says."""
    if not isinstance(data, DataLoader):
        return
    if data.batch_size is None or type(data.batch_sampler) not in (BatchSampler, type(None)):
        raise TaskError(
            "data() returned a DataLoader that makes its batches itself (batch_size = None, or a "
            "batch_sampler): the job says how to batch; give it a sampler, or return its data set"
        )
    if data.batch_size not in (1, batch_size):
        raise TaskError(
            f"data() returned a DataLoader with batch_size = {data.batch_size}, and [algorithm] batch_size "
            f"of the job is {batch_size}: leave it out, or set it to the same"
        )


def own_sampler(data: Any) -> Any:
    """The sampler of a DataLoader that decides which examples come when; None: the job's shuffling."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return None
    sampler = data.sampler
    usual = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    return None if usual else sampler


def sampled_order(sampler: Any, examples: int, generator: torch.Generator) -> Tensor:
    """The rows of an epoch as the sampler gives them, int64; what it draws follows from `generator`.

    Raises TaskError for rows that the data set of so many `examples` does not have.
    """
    if type(sampler) is SequentialSampler:
        return torch.arange(examples)
    sampler = copy.copy(sampler)
    if getattr(sampler, "generator", None) is not None:
        # One of its own would go on drawing where a repeated round has to begin anew.
        sampler.generator = None
    seed = int(torch.randint(1 << 62, (), generator=generator))
    with isolated_randomness(seed, _CPU):
        order = torch.tensor(list(sampler), dtype=torch.int64)
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < examples:
        raise TaskError(
            f"{type(sampler).__name__} gave the row {int(order.max())}, and the data set has {examples}; let "
            "it give rows from 0 on"
        )
    return order
