"""Processes that read and decode a stream's examples ahead of training."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from roundtable.client.failures import diagnose
from roundtable.core.errors import NoExamples, RoundtableError, TaskError
from roundtable.core.plugins.doors import foreign_frames
from roundtable.core.plugins.folder_imports import FilesFirst


@dataclass(frozen=True)
class Workers:
    """How many processes read a data set, and how far ahead; 0: whoever trains reads it, too."""

    count: int = 0
    prefetch: int | None = None
    prepare: Callable[[int], None] | None = None
    context: Any = None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Workers:
        """What a DataLoader says of them."""
        context = loader.multiprocessing_context
        return cls(loader.num_workers, loader.prefetch_factor, loader.worker_init_fn, context)

    def read(self, dataset: Any, seed: int) -> Iterator[Any]:
        """What the workers' copies of an iterable data set give, in turn, item by item."""
        return told(
            DataLoader(
                _Guarded(dataset),
                batch_size=None,
                collate_fn=as_it_is,
                num_workers=self.count,
                prefetch_factor=self.prefetch,
                worker_init_fn=self.prepare,
                multiprocessing_context=self.context,
                generator=torch.Generator().manual_seed(seed),
            )
        )


@dataclass(frozen=True)
class ReadingProblem:
    """An error of a worker: what of it may leave the silo, and its traceback for the silo's log.

    `starved`: it was for want of memory.
    """

    empty: bool
    words: str
    trace: str
    starved: bool = False

    @classmethod
    def of(cls, error: Exception) -> ReadingProblem:
        """What is told of an error that was caught while a data set was read."""
        starved = diagnose(error).kind == "out_of_memory"
        words = str(error)
        if not isinstance(error, RoundtableError):
            frames = foreign_frames(error)
            place = f" in {frames[-1].place}()" if frames else ""
            words = (
                f"the task's code raised {type(error).__name__}{place} while it read the training data "
                "(the silo's log has the details)"
            )
        trace = "".join(traceback.format_exception(error))
        return cls(isinstance(error, NoExamples), words, trace, starved)


class _Guarded(IterableDataset[Any]):
    """Sends errors as values: torch would put the traceback, with names of files, into the message."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset

    @override
    def __reduce__(self) -> tuple[Callable[..., _Guarded], tuple[FilesFirst, Iterable[Any]]]:
        return _guarded, (FilesFirst(), self._dataset)

    @override
    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._dataset
        except Exception as error:  # noqa: BLE001 - a task is foreign code
            yield ReadingProblem.of(error)


def _guarded(first: FilesFirst, dataset: Iterable[Any]) -> _Guarded:
    return _Guarded(dataset)


def told(items: Iterable[Any]) -> Iterator[Any]:
    """The items; raises what a worker met with."""
    for item in items:
        if isinstance(item, ReadingProblem):
            error = NoExamples(item.words) if item.empty else TaskError(item.words)
            error.add_note(item.trace)
            # The exception itself stays in the worker: torch would put its words into the message.
            raise error from (MemoryError() if item.starved else None)
        yield item


def as_it_is(item: Any) -> Any:
    """No collation."""
    return item
