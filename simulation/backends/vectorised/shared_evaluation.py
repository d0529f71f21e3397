"""Clients' test data through forward passes that several clients, or a task's loss and metrics, share.

The task's own loss and metrics run for each client and batch as they are written. Only where they ask the
model for its outputs on what the batch holds, they are given those that are there already.
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
from roundtable.client.training.module_state import borrowed
from roundtable.core.errors import RoundtableError
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import ArrayTask, told
from roundtable.simulation.backend import Measured, Work, World
from roundtable.simulation.backends.sequential import Sequential
from roundtable.simulation.backends.vectorised.recording import Unrecordable
from roundtable.simulation.backends.vectorised.served_outputs import ServedOutputs
from roundtable.simulation.world.simulated_clients import Clients

log = logging.getLogger("roundtable.simulation")
_ROWS_TOGETHER = 128
_BYTES_TOGETHER = 4 << 20
"""Of the rows that share a copy there may be so many, or more that take no more memory."""
_ALIGNMENT = 64


class SharedEvaluation(Sequential):
    """Trains as its base class, and evaluates with fewer forward passes: equal to it within float32 rounding,
    and to the bit where the model is none for `RowForward`."""

    def __init__(self, world: World, clients: Clients | None = None, device: str = "cpu") -> None:
        super().__init__(world, clients, device)
        self._tried = False
        self._outputs: ServedOutputs | None = None
        self._ready: dict[int, list[Batch]] = {}

    @override
    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Any]:
        if not self._tried:
            self._tried = True
            self._outputs = self._make()
        return super().evaluate(round, vector, work)

    @override
    def _opened(self, stack: ExitStack, place: AbstractContextManager[Measure]) -> Measure:
        self._ready = {}
        measure = super()._opened(stack, place)
        if self._outputs is not None:
            stack.enter_context(self._outputs.served())
        return measure

    @override
    def _measured(self, measure: Measure, item: Work, following: Iterable[Work]) -> Measured:
        ready: Iterable[Batch] | None = self._ready.pop(item.index, None)
        if ready is None and self._outputs is not None:
            ready = self._look_ahead(self._outputs, item, following)
        if ready is None:
            return super()._measured(measure, item, following)
        return Measured(item.client, measure(None, ready))

    def _look_ahead(
        self, outputs: ServedOutputs, item: Work, following: Iterable[Work]
    ) -> Iterable[Batch] | None:
        """The client's batches; where it and those that follow have few rows, they share a pass."""
        mine = as_tensors(self.clients.data(item.index)[1])
        if not mine or not len(mine[0]):
            return None
        together, rows, kinds = [(item.index, mine)], len(mine[0]), _kinds(mine)
        most = max(_ROWS_TOGETHER, _BYTES_TOGETHER // max(1, sum(part[0].nbytes for part in mine)))
        if not outputs.joins or rows > most:
            return self._one_by_one(outputs, mine)
        for other in following:
            if other.local or not self.clients.hold(other.index):
                break
            theirs = as_tensors(self.clients.data(other.index)[1])
            if not theirs or _kinds(theirs) != kinds:
                break
            rows += theirs[0].shape[0]
            if rows > most:
                break
            together.append((other.index, theirs))
        self._join(outputs, together)
        return self._ready.pop(item.index)

    def _one_by_one(self, outputs: ServedOutputs, data: Sequence[Tensor]) -> Iterator[Batch]:
        for batch in ordered_batches(tuple(data), self.world.job.evaluation_batch):
            outputs.expect([batch.data])
            yield batch

    def _join(self, outputs: ServedOutputs, together: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        """Batches in one copy of all data, which a task may change in its own rows."""
        most = self.world.job.evaluation_batch
        counts = [data[0].shape[0] for _, data in together]
        sizes = [[min(most, count - start) for start in range(0, count, most)] for count in counts]
        lengths = [size for own in sizes for size in own]
        parts = [torch.cat(column) for column in zip(*(data for _, data in together), strict=True)]
        pieces = zip(*(map(_aligned, torch.split(part, lengths)) for part in parts), strict=True)
        batches = [Batch(1, size, piece) for size, piece in zip(lengths, pieces, strict=True)]
        ends = list(accumulate(map(len, sizes)))
        for (index, _), own, end in zip(together, sizes, ends, strict=True):
            self._ready[index] = batches[end - len(own) : end]
        outputs.expect([batch.data for batch in batches], parts)

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


def _aligned(part: Tensor) -> Tensor:
    """The part as if it was alone: the last bit of what torch makes of it may follow from where it begins."""
    return part if part.data_ptr() % _ALIGNMENT == 0 else part.clone()


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
