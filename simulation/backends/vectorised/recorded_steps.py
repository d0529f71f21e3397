"""A task's training step over one flat vector, recorded for each shape of batch and then replayed."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundtable.client.training.batches import Batch
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.layout import Layout
from roundtable.core.task import Task
from roundtable.simulation.backends.vectorised.buffer_plan import Aliased
from roundtable.simulation.backends.vectorised.compiled_step import CompiledProgram, whole
from roundtable.simulation.backends.vectorised.instructions import Unsuitable
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.program import StepProgram, Vectors
from roundtable.simulation.backends.vectorised.recorded_work import HeldVectors, Loss, Manner, RecordedWork
from roundtable.simulation.backends.vectorised.recording import Recording, Unrecordable, record
from roundtable.simulation.backends.vectorised.staying import is_counter
from roundtable.simulation.backends.vectorised.step_check import StatedInputs, check_program

log = logging.getLogger("roundtable.simulation")
Parts = Sequence[Tensor]
_Program = tuple[Recording, Sequence[Tensor], Vectors, LocalStep]


class Steps:
    """One client after the other over `weights`, a vector of the layout."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        examples: Parts | None = None,
        algorithm: ClientAlgorithm | None = None,
    ) -> None:
        """`model` holds the job's initial weights, `examples` are the first client's, to check steps with;
        `algorithm` is asked for gradients in steps that are its own."""
        initial = layout.flatten(model).clone()
        self.model = model.to(device).train()
        self.vectors = Vectors.zeros(layout.size, device)
        self._loss = Loss(task, self.model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        views = layout.unflatten(self.weights)
        self._names = [name for name in views if name in trained]
        self.parameters = [views[name] for name in self._names]
        own = self.model.state_dict(keep_vars=True)
        self._counters = {spec.name: own[spec.name] for spec in layout.tensors if is_counter(spec)}
        self.counts: dict[str, int] = {}
        self._resting = [
            (own[spec.name].detach(), slice(spec.offset, spec.offset + spec.size))
            for spec in layout.averaged
            if spec.name not in trained
        ]
        self._algorithm = algorithm
        self.held = HeldVectors(layout, device)
        self._stated = StatedInputs(initial, self._resting, examples)
        self._programs: dict[tuple[Any, ...], StepProgram] = {}
        self._by_rows: dict[tuple[Any, ...], StepProgram] = {}
        self._refusals: dict[tuple[Any, ...], str] = {}
        self.random = False

    @property
    def weights(self) -> Tensor:
        """The client's weights as they now are."""
        return self.vectors.weights

    def begin(self, vector: Tensor, step: LocalStep, constant: Tensor | None = None) -> None:
        """A client starts from the global vector; `constant` is added to each of its gradients.

        `counts` are what its steps from now on add to counters of the model, by name.
        """
        self.vectors.begin(vector, step, constant)
        self.counts = dict.fromkeys(self._counters, 0)
        for tensor, span in self._resting:
            tensor.copy_(vector[span].view(tensor.shape))

    def settle(self) -> None:
        """Takes what steps have left in the model's own tensors (running statistics) into the weights."""
        for tensor, span in self._resting:
            self.weights[span].view(tensor.shape).copy_(tensor)

    def take(self, batch: Any, manner: Manner, rate: float, earlier: Sequence[Any] = ()) -> Tensor:
        """One step on a batch, and on an earlier one that it looks back at; returns its loss, not waited for.

        Unrecordable comes before any change.
        """
        given = (batch, *earlier)
        tensors = batch if _plain(batch) and not earlier else tree_flatten(given)[0]
        program = self._known(_key(tensors, manner)) or self.prepare(batch, manner, earlier)
        self._count(program, 1)
        return program.run(rate, *tensors)

    def take_all(
        self, batches: Iterable[Batch], manner: Callable[[int], Manner], rate: float, back: bool = False
    ) -> tuple[Tensor, list[int]]:
        """A step on each batch, step `number` from 1 in the manner of that number; their losses and sizes.

        back: whether steps look back at the batch before, the first at its own.
        """
        losses: list[Tensor] = []
        sizes: list[int] = []
        before: tuple[Any, ...] = ()
        for number, batch in enumerate(batches, 1):
            earlier = (before or (batch.data,)) if back else ()
            losses.append(self.take(batch.data, manner(number), rate, earlier).view(1))
            sizes.append(batch.size)
            before = (batch.data,)
        return torch.cat(losses), sizes

    def take_rows(
        self,
        examples: Parts,
        orders: Iterable[Tensor],
        batch_size: int,
        manner: Callable[[int], Manner],
        rate: float,
    ) -> tuple[Tensor, list[int]]:
        """The same for batches of these examples, epoch after epoch in the order given. Where the kernels are
        alone, an epoch's steps of one manner are one call, and each batch is gathered when its turn comes."""
        losses: list[Tensor] = []
        sizes: list[int] = []
        for order in orders:
            full = order.shape[0] // batch_size * batch_size
            for rows in (order[:full].view(-1, batch_size), order[full:].view(1, -1)):
                if not rows.numel():
                    continue
                manners, start = [manner(len(sizes) + number) for number in range(1, rows.shape[0] + 1)], 0
                for one, run in groupby(manners):
                    end = start + sum(1 for _ in run)
                    losses += self._repeated(one, examples, rows[start:end], rate)
                    start = end
                sizes += [rows.shape[1]] * rows.shape[0]
        return torch.cat(losses), sizes

    def _repeated(self, manner: Manner, examples: Parts, rows: Tensor, rate: float) -> list[Tensor]:
        program = self._for_rows(examples, rows[0], manner)
        self._count(program, rows.shape[0])
        if isinstance(program, CompiledProgram) and program.alone:
            return [program.repeat(rate, examples, rows)]
        return [program.run(rate, *gathered(examples, some)).view(1) for some in rows]

    def _count(self, program: StepProgram, steps: int) -> None:
        for name, added in program.counts.items():
            self.counts[name] += added * steps

    def takes_rows(self, examples: Parts, rows: Tensor, manner: Manner) -> bool:
        """Whether steps on batches such as these rows are the kernels' alone."""
        if self.weights.device.type != "cpu" or not all(map(whole, examples)):
            return False
        program = self._for_rows(examples, rows, manner)
        return isinstance(program, CompiledProgram) and program.alone

    def _for_rows(self, examples: Parts, rows: Tensor, manner: Manner) -> StepProgram:
        """The program for batches such as these rows of examples, which are not gathered if it is known."""
        key = (manner, rows.shape[0], *((part.shape[1:], part.dtype) for part in examples))
        known = self._by_rows.get(key)
        if known is None:
            known = self._by_rows[key] = self.prepare(gathered(examples, rows), manner)
        return known

    def change(self, vector: Tensor, out: Tensor) -> bool:
        """Writes what has become of the weights since `vector` to `out`; whether all of that is finite."""
        self.settle()
        library = load() if self.weights.device.type == out.device.type == "cpu" else None
        if library is not None and vector.is_contiguous() and out.is_contiguous():
            pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.weights, vector, out))
            total = float(library.difference(ctypes.c_int64(out.numel()), *pointers))
        else:
            torch.sub(self.weights.to(out.device), vector.to(out.device), out=out)
            total = out.sum().item()
        # A sum may be infinite where no value is.
        return math.isfinite(total) or bool(torch.isfinite(out).all())

    def prepare(self, batch: Any, manner: Manner, earlier: Sequence[Any] = ()) -> StepProgram:
        """The program for batches of this shape; nothing is trained. Raises Unrecordable if there is none."""
        known = self._known(_key(batch, manner)) if _plain(batch) and not earlier else None
        if known is not None:
            return known
        leaves, spec = tree_flatten((batch, *earlier))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) != len(leaves):
            raise Unrecordable("its batches hold values that are no tensors")
        key = _key(tensors, manner)
        known = self._known(key)
        if known is None:
            try:
                with self._untouched():
                    known = self._programs[key] = self._make(tensors, spec, manner)
            except Unrecordable as error:
                self._refusals[key] = str(error)
                raise
        return known

    def _known(self, key: tuple[Any, ...]) -> StepProgram | None:
        """The program of a shape that has been seen; None for a new one. Raises Unrecordable again."""
        if key in self._refusals:
            raise Unrecordable(self._refusals[key])
        return self._programs.get(key)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Puts the model's own tensors back after steps that train nobody."""
        mine = [*(tensor for tensor, _ in self._resting), *self._counters.values()]
        mine += self.held.values.values()
        before = [tensor.clone() for tensor in mine]
        try:
            yield
        finally:
            for tensor, value in zip(mine, before, strict=True):
                tensor.copy_(value)

    def _make(self, tensors: list[Tensor], spec: Any, manner: Manner) -> StepProgram:
        step = manner.step

        @torch.no_grad()
        def gradients_of(*inputs: Tensor) -> list[Tensor | None]:
            count = len(self.parameters)
            weights, batches = inputs[:count], tree_unflatten(list(inputs[count:]), spec)
            work = RecordedWork(self._loss, self._names, weights, batches, self.held, manner.phase)
            own = self._algorithm if manner.own else None
            loss, gradients = work.gradients() if own is None else own.gradients(work)
            if step.corrected or (step.pull and step.weight_decay):
                # The pull reaches everything, and with it decay; so does a constant.
                gradients = [
                    torch.zeros_like(weight) if gradient is None else gradient
                    for weight, gradient in zip(weights, gradients, strict=True)
                ]
            return [loss.detach(), *gradients]

        count = len(self.parameters)
        held = list(self.held.values.values())
        inputs = [*self.parameters, *_apart(tensors)]
        recording = _recorded_twice(gradients_of, inputs, count, self._counters, held, self.model)
        self.random = self.random or recording.random
        parts = (recording, self.parameters, self.vectors, step)
        compiled = self._compiled(parts, gradients_of, tensors)
        if compiled is not None:
            return compiled
        program = StepProgram(*parts)
        self._check(program, gradients_of, tensors)
        return program

    def _check(self, program: StepProgram, gradients_of: Any, tensors: Sequence[Tensor]) -> None:
        self._stated.beside = list(self.held.values.values())
        check_program(program, gradients_of, self.parameters, self.vectors, self._stated, tensors)

    def _compiled(
        self, parts: _Program, gradients_of: Any, tensors: Sequence[Tensor]
    ) -> CompiledProgram | None:
        """The step on compiled kernels; None where there are none, or where they err."""
        library = load() if self.weights.device.type == "cpu" else None
        if library is None:
            return None
        try:
            program = CompiledProgram(library, *parts)
            self._check(program, gradients_of, tensors)
        except (Aliased, Unsuitable, Unrecordable) as error:
            log.warning("a training step runs without the compiled kernels: %s", error)
            return None
        return program


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor in memory of its own: one that comes twice, as where a client's first batch stands for the
    one before, is two inputs."""
    found: list[Tensor] = []
    for tensor in tensors:
        twice = tensor.is_contiguous() and any(tensor is other for other in found)
        found.append(torch.empty_like(tensor).copy_(tensor) if twice else tensor)
    return found


def gathered(examples: Parts, rows: Tensor) -> Parts:
    """The batch of these rows."""
    return tuple(part.index_select(0, rows) for part in examples)


def _plain(batch: Any) -> bool:
    """Whether a batch is a tuple of tensors, as most are; asking torch to flatten it takes longer."""
    return type(batch) is tuple and all(type(part) is Tensor for part in batch)


def _key(tensors: Sequence[Tensor], manner: Manner) -> tuple[Any, ...]:
    return (manner, *((t.shape, t.stride(), t.dtype) for t in tensors))


def _recorded_twice(
    gradients_of: Any,
    inputs: list[Tensor],
    parameters: int,
    counters: Mapping[str, Tensor],
    held: Sequence[Tensor],
    model: nn.Module,
) -> Recording:
    """Records the step, and again on other data with another seed; it must depend on neither, and set no
    buffer anew on the model, of which no operation would tell."""
    devices = _cuda(inputs[0])
    other = [*inputs[:parameters], *(t.flip(0) if t.dim() else t for t in inputs[parameters:])]
    recordings = []
    with torch.random.fork_rng(devices=devices):
        for seed, values in enumerate((inputs, other)):
            torch.manual_seed(seed)
            buffers = list(model.buffers())
            recordings.append(record(gradients_of, values, counters, held))
    now = list(model.buffers())
    if len(now) != len(buffers) or any(one is not other for one, other in zip(now, buffers, strict=True)):
        raise Unrecordable("it sets a buffer of the model anew")
    difference = recordings[0].same_as(recordings[1])
    if difference is not None:
        raise Unrecordable(f"its operations depend on the data or on chance: {difference}")
    return recordings[0]


def _cuda(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.device.type == "cuda" else []
