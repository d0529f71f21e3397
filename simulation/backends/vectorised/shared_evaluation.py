"""Clients' test data through forward passes that several clients, or a task's loss and metrics, share.

The task's own loss and metrics run as they are written. Only where they ask the model for its outputs on what
the batch holds, they are given those that are there already. Where the rest is operations on those and on
the batch alone, it is recorded for each size of batch, and replayed for all but one client of a shared pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from roundtable.client.training.batches import Batch, as_tensors, ordered_batches
from roundtable.client.training.evaluation import Measure
from roundtable.client.training.metrics import Metrics, add
from roundtable.client.training.module_state import borrowed
from roundtable.core.errors import RoundtableError
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import ArrayTask, told
from roundtable.simulation.backend import Measured, Work, World
from roundtable.simulation.backends.module_condition import ModuleCondition
from roundtable.simulation.backends.sequential import Sequential
from roundtable.simulation.backends.vectorised.recorded_figures import FiguresBySize, aligned
from roundtable.simulation.backends.vectorised.recording import Unrecordable
from roundtable.simulation.backends.vectorised.served_outputs import ServedOutputs
from roundtable.simulation.world.simulated_clients import Clients

log = logging.getLogger("roundtable.simulation")
_ROWS_TOGETHER = 128
_BYTES_TOGETHER = 4 << 20
"""Of the rows that share a copy there may be so many, or more that take no more memory."""


class SharedEvaluation(Sequential):
    """Trains as its base class, and evaluates with fewer forward passes: equal to it within float32 rounding,
    and to the bit where the model is none for `RowForward`."""

    def __init__(self, world: World, clients: Clients | None = None, device: str = "cpu") -> None:
        super().__init__(world, clients, device)
        self._tried = False
        self._outputs: ServedOutputs | None = None
        self._ready: dict[int, list[Batch]] = {}
        self._replayed: dict[int, Metrics] = {}
        self._figures = FiguresBySize(world.task)

    @override
    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Any]:
        if not self._tried:
            self._tried = True
            self._outputs = self._make()
        return super().evaluate(round, vector, work)

    @override
    def _opened(self, stack: ExitStack, place: AbstractContextManager[Measure]) -> Measure:
        self._ready, self._replayed = {}, {}
        measure = super()._opened(stack, place)
        if self._outputs is not None:
            stack.enter_context(self._outputs.served())
        return measure

    @override
    def _fits(self, item: Work, first: Work, condition: ModuleCondition | None) -> bool:
        # Of clients whose figures are there already nothing has been asked since.
        known = item.index in self._replayed and not (first.local or item.local)
        return known or super()._fits(item, first, condition)

    @override
    def _measured(self, measure: Measure, item: Work, following: Iterable[Work]) -> Measured:
        known = self._replayed.pop(item.index, None)
        if known is not None:
            return Measured(item.client, known)
        ready: Iterable[Batch] | None = self._ready.pop(item.index, None)
        if ready is None and self._outputs is not None:
            together = self._look_ahead(self._outputs, item, following)
            if isinstance(together, _Together):
                return self._measured_together(measure, item, self._outputs, together)
            ready = together
        if ready is None:
            return super()._measured(measure, item, following)
        return Measured(item.client, measure(None, ready))

    def _measured_together(
        self, measure: Measure, item: Work, served: ServedOutputs, together: _Together
    ) -> Measured:
        """The first of some clients. The others' figures are replayed where they can be, if that gives to the
        bit what the task itself measures at one of them."""
        outputs, found = together.outputs, list[Metrics | None]()
        if outputs is not None and len(together.indices) > 1:
            parts, lengths = together.parts, together.lengths
            found = together.by_client(self._figures.of(self.module, served, parts, outputs, lengths))
        replayed = {n: figures for n, figures in enumerate(found) if figures is not None}
        witness = min(replayed, default=0)
        asked = [n for n in range(len(together.indices)) if n == witness or n not in replayed]
        ready = together.expected_by(served, asked)
        mine = measure(None, ready.pop(0))
        if replayed:
            seen = self._seen(measure, ready.pop(witness)) if witness else mine
            if repr(seen) != repr(replayed[witness]) or not served.holds():
                self._figures.differs()
                replayed, ready = {}, together.expected_by(served, range(1, len(together.indices)))
            replayed.pop(0, None)
        self._replayed = {together.indices[n]: figures for n, figures in replayed.items()}
        self._ready = {together.indices[n]: batches for n, batches in ready.items()}
        return Measured(item.client, mine)

    @staticmethod
    def _seen(measure: Measure, batches: Sequence[Batch]) -> Metrics | None:
        """None where the task raises, which it will again when it is that client's turn."""
        try:
            return measure(None, batches)
        except Exception:  # noqa: BLE001 - a task is foreign code
            return None

    def _look_ahead(
        self, outputs: ServedOutputs, item: Work, following: Iterable[Work]
    ) -> Iterable[Batch] | _Together | None:
        """The client's batches; where it and those that follow have few rows, they share a pass."""
        mine = as_tensors(self.clients.data(item.index)[1])
        if not mine or not len(mine[0]):
            return None
        together, rows, kinds = [(item.index, mine)], len(mine[0]), _kinds(mine)
        most = max(_ROWS_TOGETHER, _BYTES_TOGETHER // max(1, sum(part[0].nbytes for part in mine)))
        if not outputs.joins or rows > most:
            return self._one_by_one(outputs, mine)
        for other in () if item.local else following:
            if other.local or not self.clients.hold(other.index):
                break
            theirs = as_tensors(self.clients.data(other.index)[1])
            if not theirs or _kinds(theirs) != kinds:
                break
            rows += theirs[0].shape[0]
            if rows > most:
                break
            together.append((other.index, theirs))
        return _Together(outputs, together, self.world.job.evaluation_batch)

    def _one_by_one(self, outputs: ServedOutputs, data: Sequence[Tensor]) -> Iterator[Batch]:
        for batch in ordered_batches(tuple(data), self.world.job.evaluation_batch):
            found = outputs.through(batch.data)
            outputs.expect([batch.data], () if found is None else [found])
            yield batch

    def _make(self) -> ServedOutputs | None:
        """None where nothing can be shared: the population's first client decides, in every process alike."""
        world, cpu = self.world, torch.device("cpu")
        if isinstance(world.task, ArrayTask) or told(world.task) or self.device != "cpu":
            return None
        try:
            examples = _some([*reversed(self.clients.data(0))])
        except RoundtableError:
            return None  # The client fails where it is measured.
        if examples is None:
            return None
        layout, module, most = world.layout.model, self.module, world.job.evaluation_batch
        with isolated_randomness(0, cpu), borrowed(module, layout, world.initial.vector[: layout.size], None):
            module.eval()
            try:
                with torch.no_grad():
                    return ServedOutputs(world.task, module, [part[:most] for part in examples])
            except Unrecordable as error:
                log.debug("an evaluation shares no forward passes: %s", error)
            except Exception:
                # What a task raises it raises at its clients too, whose failure it is.
                log.debug("an evaluation shares no forward passes", exc_info=True)
        return None


class _Together:
    """Clients whose batches lie in one copy of all data, which a task may change in its own rows."""

    def __init__(
        self, served: ServedOutputs, members: Sequence[tuple[int, Sequence[Tensor]]], most: int
    ) -> None:
        """`members` are clients' numbers and data; `most` examples are in a batch."""
        self.indices = [index for index, _ in members]
        counts = [data[0].shape[0] for _, data in members]
        sizes = [[min(most, count - start) for start in range(0, count, most)] for count in counts]
        self.lengths = [size for own in sizes for size in own]
        ends = list(accumulate(map(len, sizes)))
        self._places = [slice(end - len(own), end) for own, end in zip(sizes, ends, strict=True)]
        self.parts = tuple([torch.cat(column) for column in zip(*(data for _, data in members), strict=True)])
        self.outputs = served.through(self.parts)

    def by_client(self, figures: Sequence[Metrics | None]) -> list[Metrics | None]:
        """Those of batches added up for each client; None where one of its batches has none."""
        found: list[Metrics | None] = []
        for place in self._places:
            sums: Metrics | None = {}
            for own in figures[place]:
                if own is None or sums is None:
                    sums = None
                else:
                    add(sums, own)
            found.append(sums)
        return found

    def expected_by(self, served: ServedOutputs, clients: Iterable[int]) -> dict[int, list[Batch]]:
        """The batches of these clients, counted from 0, whose outputs `served` gives from now on."""
        columns = [torch.split(part, self.lengths) for part in self.parts]
        outputs = () if self.outputs is None else torch.split(self.outputs, self.lengths)
        ready: dict[int, list[Batch]] = {}
        given: list[Tensor] = []
        for n in clients:
            place = self._places[n]
            pieces = zip(*(map(aligned, column[place]) for column in columns), strict=True)
            sized = enumerate(zip(self.lengths[place], pieces, strict=True))
            ready[n] = [Batch(1, size, piece, number) for number, (size, piece) in sized]
            given += outputs[place]
        if ready:
            served.expect([batch.data for own in ready.values() for batch in own], given)
        return ready


def _kinds(data: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What must be the same for data to lie in one tensor for each part."""
    return [(part.shape[1:], part.dtype) for part in data]


def _some(data: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """The first of these that holds two examples or more as tensors."""
    for part in data:
        examples = as_tensors(part)
        if examples and len(examples[0]) > 1:
            return examples
    return None
