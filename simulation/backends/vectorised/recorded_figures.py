"""A task's loss and metrics on batches of one size, recorded as operations on a batch and its outputs.

What is replayed are torch's own operations on tensors of the same shapes, so that the figures are the task's
to the bit. That they are all of it is found out before: by two recordings on rows in another order, during
which no value may leave torch, and by what the task has set on itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.client.training.metrics import Metrics, checked
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.task import Task
from roundtable.simulation.backends.module_condition import TaskState
from roundtable.simulation.backends.vectorised.program import StepProgram, Vectors, needed
from roundtable.simulation.backends.vectorised.recording import Recording, Ref, Unrecordable, record
from roundtable.simulation.backends.vectorised.served_outputs import (
    Parts,
    ServedOutputs,
    chance_state,
    figures_of,
)

log = logging.getLogger("roundtable.simulation")
_ALIGNMENT = 64
_OFTEN = 16
"""A size of batch is recorded when so many have come: that takes as long as to measure them."""
_MOST_RECORDED = 256
_Form = tuple[str, Any, Any]
"""A figure's name, its sum and its count: a number, or None where the operations give it."""


class RecordedFigures:
    """What `task` measures of batches [size, ...] whose outputs are there.

    Raises Unrecordable where operations on a batch and its outputs are not all that it does, or give other
    figures than the task's by a bit.
    """

    def __init__(
        self, task: Task, module: nn.Module, served: ServedOutputs, batch: Parts, outputs: Tensor
    ) -> None:
        """`module` is in evaluation mode; `outputs` [size, ...] are its own for `batch`."""
        self._task = task
        self._size = len(outputs)
        self._forms: list[_Form] = []
        values = [*batch, outputs]
        state = TaskState(task)
        recording = self._recorded(module, served, [part.clone() for part in values])
        again = self._recorded(module, served, [part.flip(0) for part in values])
        if (difference := recording.same_as(again)) is not None:
            raise Unrecordable(difference)
        if not state.holds():
            raise Unrecordable("it keeps something on the task")
        if recording.random:
            raise Unrecordable("it draws random numbers")
        self._check_constants(recording, module)
        program = _Figures(recording, (), Vectors.zeros(0, outputs.device), LocalStep())
        self.places = [n for n, ref in enumerate(recording.inputs) if program.reads(ref)]
        """Which of a batch's parts, and then its outputs, the operations read."""
        self._run = program.run
        self._check(module, served, [part.flip(0) for part in values])

    def of(self, batches: Sequence[Sequence[Tensor | None]]) -> list[Metrics]:
        """(sum, count) by name for each batch, given as its parts followed by its outputs; of those not in
        `places` there may be None."""
        found: list[Any] = [self._run(0.0, *batch) for batch in batches]
        columns = [torch.stack(column).flatten().tolist() for column in zip(*found, strict=True)]
        return [self._named(row) for row in zip(*columns, strict=True)]

    def _named(self, row: Sequence[float]) -> Metrics:
        figures, left = {}, iter(row)
        for name, total, count in self._forms:
            total = float(next(left) if total is None else total)
            figures[name] = total, int(next(left) if count is None else count)
        loss = figures["loss"][0]
        figures["loss"] = loss * self._size, self._size
        return figures

    def _recorded(self, module: nn.Module, served: ServedOutputs, values: Sequence[Tensor]) -> Recording:
        def figures(*given: Tensor) -> list[Tensor | None]:
            return list(self._asked(module, served, given))

        before = chance_state()
        recording = record(figures, values)
        if chance_state() != before:
            raise Unrecordable("it draws random numbers")
        return recording

    def _asked(self, module: nn.Module, served: ServedOutputs, given: Sequence[Tensor]) -> list[Tensor]:
        """The figures that are tensors. The others must be the same each time."""
        *batch, outputs = given
        task, tensors, forms = self._task, list[Tensor](), list[_Form]()
        with served.giving(tuple(batch), outputs):
            loss = task.loss(module, tuple(batch))
            measure = getattr(task, "metrics", None)
            pairs = {} if measure is None else measure(module, tuple(batch))
        if not isinstance(pairs, Mapping) or "loss" in pairs:
            raise Unrecordable("its metrics are no {name: (sum, count)}")
        if not isinstance(loss, Tensor):
            raise Unrecordable("its loss is no tensor")
        for name, pair in chain([("loss", (loss, self._size))], pairs.items()):
            total, count = pair
            for value in (total, count):
                if isinstance(value, Tensor):
                    tensors.append(value)
                elif not isinstance(value, int | float):
                    raise Unrecordable(f"{name!r} is neither a tensor nor a number")
            known = [None if isinstance(value, Tensor) else value for value in (total, count)]
            forms.append((str(name), known[0], known[1]))
        if any(tensor.numel() != 1 or tensor.is_complex() for tensor in tensors):
            raise Unrecordable("its figures are more than one number each")
        if self._forms and forms != self._forms:
            raise Unrecordable("it measures one thing here and another there")
        self._forms = forms
        return tensors

    @staticmethod
    def _check_constants(recording: Recording, module: nn.Module) -> None:
        own = {t.untyped_storage().data_ptr() for t in chain(module.parameters(), module.buffers())}
        for tensor in recording.constants.values():
            if tensor.numel() and tensor.untyped_storage().data_ptr() in own:
                raise Unrecordable("it reads the model's own tensors")

    def _check(self, module: nn.Module, served: ServedOutputs, values: Sequence[Tensor]) -> None:
        *batch, outputs = values
        with served.giving(tuple(batch), outputs):
            expected = figures_of(self._task, module, tuple(batch))
        (found,) = self.of([values])
        expected["loss"] = expected["loss"][0] * self._size, self._size
        if repr(found) != repr(checked({**expected}, self._task)):
            raise Unrecordable("replayed, it measures something else")


class _Figures(StepProgram):
    """All results of a recording, without any step."""

    @override
    def _write(self) -> str:
        results = [ref for ref in self._recording.results if ref]
        calls = [call for call in self._recording.calls if not self._hoisted(call)]
        calls = needed(calls, results)
        self._read = {ref for call in calls for ref in call.reads} | {*results}
        names = [self._name(ref) for ref in results]
        return self._text_of_function(list(map(self._line, calls)), f"[{', '.join(names)}]", set(names))

    def reads(self, ref: Ref) -> bool:
        return ref in self._read


class FiguresBySize:
    """What a task measures, recorded for each size of batch that comes often."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._state = TaskState(task)
        self._known: dict[tuple[Any, ...], RecordedFigures | None] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._left = _MOST_RECORDED

    def of(
        self,
        module: nn.Module,
        served: ServedOutputs,
        parts: Parts,
        outputs: Tensor,
        lengths: Sequence[int],
    ) -> list[Metrics | None]:
        """For each batch, of such a length, what it gives; None where the task has to be asked.

        `parts` [n, ...] are those of all batches one after the other, `outputs` [n, ...] the model's.
        """
        if not self._state.holds():
            # What was recorded may follow from what has been set on the task since.
            self._state = TaskState(self._task)
            self._known = {key: known for key, known in self._known.items() if known is None}
        columns = [*parts, outputs]
        pieces: list[Sequence[Tensor] | None] = [None] * len(columns)
        found: list[Metrics | None] = [None] * len(lengths)
        numbers: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            numbers.setdefault(length, []).append(number)

        def piece(place: int, number: int) -> Tensor:
            own = pieces[place]
            if own is None:
                own = pieces[place] = torch.split(columns[place], [*lengths])
            return aligned(own[number])

        for length, own in numbers.items():
            key = (length, *((part.shape[1:], part.dtype) for part in parts))
            self._seen[key] += len(own)
            if key not in self._known and self._seen[key] >= _OFTEN and self._left > 0:
                example = [piece(place, own[0]) for place in range(len(columns))]
                self._known[key] = self._record(module, served, example)
            recorded = self._known.get(key)
            if recorded is not None:
                wanted = set(recorded.places)
                batches = [
                    [piece(place, number) if place in wanted else None for place in range(len(columns))]
                    for number in own
                ]
                try:
                    replayed = recorded.of(batches)
                except Exception:
                    # The task is asked, and raises at the client whose values it cannot do with.
                    log.debug("figures of batches of %d are not replayed", length, exc_info=True)
                    continue
                for number, figures in zip(own, replayed, strict=True):
                    found[number] = figures
        return found

    def differs(self) -> None:
        """The task has been seen to measure something else: it is always asked from now on."""
        log.debug("a task's loss and metrics are not replayed: they give other figures than they did")
        self._known, self._left = {}, 0

    def _record(
        self, module: nn.Module, served: ServedOutputs, example: Sequence[Tensor]
    ) -> RecordedFigures | None:
        self._left -= 1
        *batch, outputs = example
        try:
            return RecordedFigures(self._task, module, served, tuple(batch), outputs)
        except Unrecordable as error:
            log.debug("a task's loss and metrics are not replayed: %s", error)
        except Exception:
            # What a task raises it raises at its clients too, whose failure it is.
            log.debug("a task's loss and metrics are not replayed", exc_info=True)
        return None


def aligned(part: Tensor) -> Tensor:
    """The part as if it was alone: the last bit of what torch makes of it may follow from where it begins."""
    return part if part.data_ptr() % _ALIGNMENT == 0 else part.clone()
