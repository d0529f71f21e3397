"""A task's training step over one flat vector, recorded for each shape of batch and then replayed."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from roundtable.client.training.batches import Batch
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.layout import Layout
from roundtable.core.task import Task
from roundtable.simulation.backends.vectorised.buffer_plan import Aliased
from roundtable.simulation.backends.vectorised.compiled_step import CompiledProgram, whole
from roundtable.simulation.backends.vectorised.instructions import Unsuitable
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.program import StepProgram, Vectors
from roundtable.simulation.backends.vectorised.recording import Recording, Unrecordable, record
from roundtable.simulation.backends.vectorised.staying import is_counter
from roundtable.simulation.backends.vectorised.step_check import StatedInputs, check_program

log = logging.getLogger("roundtable.simulation")
Parts = Sequence[Tensor]
_Program = tuple[Recording, Sequence[Tensor], Vectors, LocalStep]


class Loss(nn.Module):
    """`Task.loss` as a module, so that it can be called with other tensors in the model's place."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    @override
    def forward(self, batch: Any) -> Tensor:
        """The scalar loss of a batch."""
        loss = self._task.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise Unrecordable(f"{type(self._task).__name__}.loss() returned {shape}, not a scalar tensor")
        return loss


class Steps:
    """One client after the other over `weights`, a vector of the layout."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        examples: Parts | None = None,
    ) -> None:
        """`model` holds the job's initial weights, `examples` are the first client's, to check steps with."""
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
        self._counts: dict[str, int] | None = None
        self._resting = [
            (own[spec.name].detach(), slice(spec.offset, spec.offset + spec.size))
            for spec in layout.averaged
            if spec.name not in trained
        ]
        self._stated = StatedInputs(initial, self._resting, examples)
        self._programs: dict[tuple[Any, ...], StepProgram] = {}
        self._refusals: dict[tuple[Any, ...], str] = {}
        self.random = False

    @property
    def weights(self) -> Tensor:
        """The client's weights as they now are."""
        return self.vectors.weights

    def begin(self, vector: Tensor, step: LocalStep, constant: Tensor | None = None) -> None:
        """A client starts from the global vector; `constant` is added to each of its gradients."""
        self.vectors.begin(vector, step, constant)
        for tensor, span in self._resting:
            tensor.copy_(vector[span].view(tensor.shape))

    @property
    def counts(self) -> dict[str, int]:
        """What each step adds to counters of the model, by name."""
        return self._counts or {}

    def settle(self) -> None:
        """Takes what steps have left in the model's own tensors (running statistics) into the weights."""
        for tensor, span in self._resting:
            self.weights[span].view(tensor.shape).copy_(tensor)

    def take(self, batch: Any, step: LocalStep, rate: float) -> Tensor:
        """One step on a batch; returns its loss, not waited for. Unrecordable comes before any change."""
        tensors = batch if _plain(batch) else tree_flatten(batch)[0]
        program = self._known(_key(tensors, step)) or self.prepare(batch, step)
        return program.run(rate, *tensors)

    def take_all(self, batches: Iterable[Batch], step: LocalStep, rate: float) -> tuple[Tensor, list[int]]:
        """A step on each batch; their losses and sizes."""
        losses: list[Tensor] = []
        sizes: list[int] = []
        for batch in batches:
            losses.append(self.take(batch.data, step, rate).view(1))
            sizes.append(batch.size)
        return torch.cat(losses), sizes

    def take_rows(
        self, examples: Parts, orders: Iterable[Tensor], batch_size: int, step: LocalStep, rate: float
    ) -> tuple[Tensor, list[int]]:
        """The same for batches of these examples, epoch after epoch in the order given. Where the kernels are
        alone, an epoch is one call, and each batch is gathered when its turn comes."""
        losses: list[Tensor] = []
        sizes: list[int] = []
        for order in orders:
            full = len(order) // batch_size * batch_size
            for rows in (order[:full].view(-1, batch_size), order[full:].view(1, -1)):
                if not rows.numel():
                    continue
                program = self.prepare(gathered(examples, rows[0]), step)
                if isinstance(program, CompiledProgram) and program.alone:
                    losses.append(program.repeat(rate, examples, rows))
                else:
                    losses += [program.run(rate, *gathered(examples, some)).view(1) for some in rows]
                sizes += [rows.shape[1]] * len(rows)
        return torch.cat(losses), sizes

    def takes_rows(self, examples: Parts, rows: Tensor, step: LocalStep) -> bool:
        """Whether steps on batches such as these rows are the kernels' alone."""
        if self.weights.device.type != "cpu" or not all(map(whole, examples)):
            return False
        program = self.prepare(gathered(examples, rows), step)
        return isinstance(program, CompiledProgram) and program.alone

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

    def prepare(self, batch: Any, step: LocalStep) -> StepProgram:
        """The program for batches of this shape; nothing is trained. Raises Unrecordable if there is none."""
        known = self._known(_key(batch, step)) if _plain(batch) else None
        if known is not None:
            return known
        leaves, spec = tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) != len(leaves):
            raise Unrecordable("its batches hold values that are no tensors")
        key = _key(tensors, step)
        known = self._known(key)
        if known is None:
            try:
                with self._untouched():
                    known = self._programs[key] = self._make(tensors, spec, step)
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
        before = [tensor.clone() for tensor in mine]
        try:
            yield
        finally:
            for tensor, value in zip(mine, before, strict=True):
                tensor.copy_(value)

    def _make(self, tensors: list[Tensor], spec: Any, step: LocalStep) -> StepProgram:
        def gradients_of(*inputs: Tensor) -> list[Tensor | None]:
            count = len(self.parameters)
            leaves = [value.detach().requires_grad_() for value in inputs[:count]]
            state = {f"model.{name}": leaf for name, leaf in zip(self._names, leaves, strict=True)}
            loss = functional_call(self._loss, state, (tree_unflatten(list(inputs[count:]), spec),))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            if step.corrected or (step.pull and step.weight_decay):
                # The pull reaches everything, and with it decay; so does a constant.
                gradients = tuple(
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, gradients, strict=True)
                )
            return [loss.detach(), *gradients]

        count = len(self.parameters)
        recording = _recorded_twice(gradients_of, [*self.parameters, *tensors], count, self._counters)
        if self._counts is not None and self._counts != recording.counts:
            raise Unrecordable("batches of different shapes move counters of the model differently")
        self._counts = recording.counts
        self.random = self.random or recording.random
        parts = (recording, self.parameters, self.vectors, step)
        compiled = self._compiled(parts, gradients_of, tensors)
        if compiled is not None:
            return compiled
        program = StepProgram(*parts)
        self._check(program, gradients_of, tensors)
        return program

    def _check(self, program: StepProgram, gradients_of: Any, tensors: Sequence[Tensor]) -> None:
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


def gathered(examples: Parts, rows: Tensor) -> Parts:
    """The batch of these rows."""
    return tuple(part.index_select(0, rows) for part in examples)


def _plain(batch: Any) -> bool:
    """Whether a batch is a tuple of tensors, as most are; asking torch to flatten it takes longer."""
    return type(batch) is tuple and all(type(part) is Tensor for part in batch)


def _key(tensors: Sequence[Tensor], step: LocalStep) -> tuple[Any, ...]:
    return (step, *((t.shape, t.stride(), t.dtype) for t in tensors))


def _recorded_twice(
    gradients_of: Any, inputs: list[Tensor], parameters: int, counters: Mapping[str, Tensor]
) -> Recording:
    """Records the step, and again on other data with another seed; it must depend on neither."""
    devices = _cuda(inputs[0])
    other = [*inputs[:parameters], *(t.flip(0) if t.dim() else t for t in inputs[parameters:])]
    recordings = []
    with torch.random.fork_rng(devices=devices):
        for seed, values in enumerate((inputs, other)):
            torch.manual_seed(seed)
            recordings.append(record(gradients_of, values, counters))
    difference = recordings[0].same_as(recordings[1])
    if difference is not None:
        raise Unrecordable(f"its operations depend on the data or on chance: {difference}")
    return recordings[0]


def _cuda(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.device.type == "cuda" else []
