"""Reads a data set that only knows how to begin, or how to give and take its own state."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from roundtable.client.streams.kept_position import DAMAGED, Position, is_count
from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.random_state import DataRandomness, seed_generators
from roundtable.client.streams.shares import WHOLE, ReadingShare
from roundtable.client.streams.workers import Workers
from roundtable.core.errors import EncodingError, NoExamples, TaskError

_BEGINNING = "_roundtable_beginning"


class IterableReader:
    """A `StreamReader` of any iterable data set.

    With `state_dict` and `load_state_dict`, as torchdata and Hugging Face name them, the data set goes on by
    itself; its state has to be plain values, as JSON has them. Without, what earlier rounds took is read and
    thrown away. `set_epoch`, where there is one, is told the epoch from 0. All who share the reading read
    everything, and each keeps its part.
    """

    def __init__(
        self,
        dataset: Any,
        seed: StreamSeed,
        position: Position | None,
        share: ReadingShare = WHOLE,
        workers: Workers = Workers(),  # noqa: B008 - a frozen value
    ) -> None:
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._seed = seed
        self._share = share
        self._workers = workers
        # As many workers give their examples in another order.
        self._called = f"{self._name} read by {workers.count} workers" if workers.count else self._name
        self._stateful = _keeps_its_place(dataset)
        if self._stateful and workers.count:
            raise TaskError(
                f"the training data, a {self._name}, keep their own place, which each process of a "
                "DataLoader would move for itself: set num_workers = 0"
            )
        epoch, taken, state = _checked(position, self._called, self._stateful)
        self._epoch = epoch
        self._taken = taken
        self._state = state
        self._randomness = DataRandomness()
        self._iterator: Iterator[Any] | None = None
        self._last: list[Any] = []

    @property
    def epoch(self) -> int:
        return self._epoch

    def counts(self, examples: int) -> list[int]:
        bounds = self._bounds(examples)
        return [after - before for before, after in pairwise(bounds)]

    def take(self, examples: int) -> list[Any]:
        with self._randomness:
            taken = [self._next() for _ in range(examples)]
        self._last = taken[-1:]
        bounds = self._bounds(examples)
        return taken[bounds[self._share.rank] : bounds[self._share.rank + 1]]

    def filler(self) -> Any:
        return self._last[0]

    def position(self) -> Position:
        state = None
        if self._stateful:
            state = _plain(self._dataset.state_dict(), self._name)
        return {"iterable": self._called, "epoch": self._epoch, "taken": self._taken, "state": state}

    def close(self) -> None:
        self._iterator = None

    def _bounds(self, examples: int) -> list[int]:
        ranks = self._share.ranks
        return [round(i * examples / ranks) for i in range(ranks + 1)]

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._resumed()
        for example in self._iterator:
            self._taken += 1
            return example
        if not self._taken:
            raise NoExamples(f"the training stream {self._name} gave no example")
        self._epoch, self._taken, self._state = self._epoch + 1, 0, None
        self._iterator = self._resumed()
        return self._next()

    def _resumed(self) -> Iterator[Any]:
        """The data set's iterator, at the place up to which it was read."""
        dataset, taken = self._dataset, self._taken
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(self._epoch - 1)
        path = ("epoch", self._epoch, taken) if self._stateful else ("epoch", self._epoch)
        seed_generators(self._seed.number(*path))
        if self._stateful:
            # A round that is done again has to find the data set as it was before anything was read.
            beginning = _beginning(dataset)
            dataset.load_state_dict(beginning if self._state is None else copy.deepcopy(self._state))
            return iter(dataset)
        iterator: Iterator[Any]
        if self._workers.count:
            iterator = self._workers.read(dataset, self._seed.number("workers", self._epoch))
        else:
            iterator = iter(dataset)
        if sum(1 for _ in islice(iterator, taken)) < taken:
            raise TaskError(
                f"the training stream {self._name} has changed: it ends before the {taken:,} examples up to "
                "which it was read; keep it as it is while a job runs"
            )
        return iterator


def from_the_beginning(dataset: Any) -> Iterator[Any]:
    """The examples of an iterable data set, once; one with a place of its own is put back there."""
    if not _keeps_its_place(dataset):
        yield from dataset
        return
    before = copy.deepcopy(dataset.state_dict())
    dataset.load_state_dict(_beginning(dataset))
    try:
        yield from dataset
    finally:
        dataset.load_state_dict(before)


def _keeps_its_place(dataset: Any) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def _beginning(dataset: Any) -> Any:
    """A copy of the state that the data set was in before anything was read of it."""
    return copy.deepcopy(vars(dataset).setdefault(_BEGINNING, copy.deepcopy(dataset.state_dict())))


def _plain(state: Any, name: str) -> Any:
    try:
        if json.loads(json.dumps(state, allow_nan=False)) == state:
            return state
    except (TypeError, ValueError, RecursionError):
        pass
    raise TaskError(
        f"{name}.state_dict() gave a {type(state).__name__} with values that do not come back from JSON as "
        "they were; keep dicts with texts as keys, lists, texts and numbers in it, or leave the method out"
    )


def _checked(position: Position | None, name: str, stateful: bool) -> tuple[int, int, Any]:
    """(epoch, examples taken in it, the data set's state). Raises TaskError for a position in other data."""
    if position is None:
        return 1, 0, None
    epoch, taken, state = position.get("epoch"), position.get("taken"), position.get("state")
    if position.get("iterable") != name or stateful != (state is not None):
        raise TaskError(
            f"the training data, a {name}, are not those in which this job's position is kept; bring those "
            "back, or remove the job's folder from the agent's state folder to begin anew"
        )
    if not (is_count(epoch) and is_count(taken) and epoch):
        raise EncodingError(DAMAGED)
    return epoch, taken, state
