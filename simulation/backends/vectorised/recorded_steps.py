"""A task's training step over one flat vector, recorded for each shape of batch and then replayed."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable, Sequence
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

log = logging.getLogger("roundtable.simulation")
Parts = Sequence[Tensor]
_Program = tuple[Recording, Sequence[Tensor], Vectors, LocalStep]
_TOLERANCE = 1e-4
_CHECKED_RATE = 0.125


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
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise Unrecordable(f"{type(self._task).__name__}.loss() returned {found}, not a scalar tensor")
        return loss


class Steps:
    """One client after the other over `weights`, a vector of the layout."""

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.vectors = Vectors.zeros(layout.size, device)
        self._loss = Loss(task, self.model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        views = layout.unflatten(self.weights)
        self._names = [name for name in views if name in trained]
        self.parameters = [views[name] for name in self._names]
        own = self.model.state_dict(keep_vars=True)
        self._resting = [
            (own[spec.name].detach(), slice(spec.offset, spec.offset + spec.size))
            for spec in layout.averaged
            if spec.name not in trained
        ]
        self._programs: dict[tuple[Any, ...], StepProgram] = {}
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

    def take(self, batch: Any, step: LocalStep, rate: float) -> Tensor:
        """One step on a batch; returns its loss, not waited for. Unrecordable comes before any change."""
        tensors = batch if _plain(batch) else tree_flatten(batch)[0]
        program = self._programs.get(_key(tensors, step)) or self.prepare(batch, step)
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
        """The program for batches of this shape; nothing is trained."""
        known = self._programs.get(_key(batch, step)) if _plain(batch) else None
        if known is not None:
            return known
        leaves, spec = tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) != len(leaves):
            raise Unrecordable("its batches hold values that are no tensors")
        key = _key(tensors, step)
        if key not in self._programs:
            self._programs[key] = self._make(tensors, spec, step)
        return self._programs[key]

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

        recording = _recorded_twice(gradients_of, [*self.parameters, *tensors], len(self.parameters))
        self.random = self.random or recording.random
        parts = (recording, self.parameters, self.vectors, step)
        compiled = self._compiled(parts, gradients_of, tensors)
        if compiled is not None:
            return compiled
        program = StepProgram(*parts)
        if not self._programs:
            self._check(program, gradients_of, tensors, step)
        return program

    def _compiled(
        self, parts: _Program, gradients_of: Any, tensors: Sequence[Tensor]
    ) -> CompiledProgram | None:
        """The step on compiled kernels; None where there are none, or where they err."""
        library = load() if self.weights.device.type == "cpu" else None
        if library is None:
            return None
        try:
            program = CompiledProgram(library, *parts)
            self._check(program, gradients_of, tensors, parts[-1])
        except (Aliased, Unsuitable, Unrecordable) as error:
            log.warning("a training step runs without the compiled kernels: %s", error)
            return None
        return program

    def _check(
        self, program: StepProgram, gradients_of: Any, tensors: Sequence[Tensor], step: LocalStep
    ) -> None:
        """A program is held against autograd before it is trusted: the first, and all on compiled kernels."""
        before = (self.weights.clone(), self.vectors.velocity.clone())
        with torch.random.fork_rng(devices=_cuda(self.weights)):
            torch.manual_seed(0)
            loss, *gradients = gradients_of(*self.parameters, *tensors)
            expected = _stepped(self, gradients, step, _CHECKED_RATE)
            torch.manual_seed(0)
            found = program.run(_CHECKED_RATE, *tensors)
        change = self.weights - before[0]
        self.weights.copy_(before[0])
        self.vectors.velocity.copy_(before[1])
        scale = float(expected.abs().amax()) if expected.numel() else 0.0
        error = float((change - expected).abs().amax()) if expected.numel() else 0.0
        if not torch.isfinite(loss):
            return
        if not error <= _TOLERANCE * max(scale, 1e-12) + 1e-7 or not torch.allclose(loss, found, rtol=1e-4):
            raise Unrecordable(
                f"its first step differs from autograd's by {error:.3g} in weights that moved {scale:.3g}"
            )


def gathered(examples: Parts, rows: Tensor) -> Parts:
    """The batch of these rows."""
    return tuple(part.index_select(0, rows) for part in examples)


def _plain(batch: Any) -> bool:
    """Whether a batch is a tuple of tensors, as most are; asking torch to flatten it takes longer."""
    return type(batch) is tuple and all(type(part) is Tensor for part in batch)


def _key(tensors: Sequence[Tensor], step: LocalStep) -> tuple[Any, ...]:
    return (step, *((t.shape, t.stride(), t.dtype) for t in tensors))


def _recorded_twice(gradients_of: Any, inputs: list[Tensor], parameters: int) -> Recording:
    """Records the step, and again on other data with another seed; it must depend on neither."""
    devices = _cuda(inputs[0])
    other = [*inputs[:parameters], *(t.flip(0) if t.dim() else t for t in inputs[parameters:])]
    recordings = []
    with torch.random.fork_rng(devices=devices):
        for seed, values in enumerate((inputs, other)):
            torch.manual_seed(seed)
            recordings.append(record(gradients_of, values))
    difference = recordings[0].same_as(recordings[1])
    if difference is not None:
        raise Unrecordable(f"its operations depend on the data or on chance: {difference}")
    return recordings[0]


def _stepped(steps: Steps, gradients: Sequence[Tensor | None], step: LocalStep, rate: float) -> Tensor:
    """What one step of torch's SGD adds to the weights, as a flat vector; the weights are left alone."""
    twins = [nn.Parameter(p.detach().clone()) for p in steps.parameters]
    reached = [(twin, g) for twin, g in zip(twins, gradients, strict=True) if g is not None]
    for number, (twin, gradient) in enumerate(zip(twins, gradients, strict=True)):
        if gradient is not None:
            start = steps.parameters[number].storage_offset() - steps.weights.storage_offset()
            target = steps.vectors.target[start : start + twin.numel()].view(twin.shape)
            drawn = step.pull * twin.detach() - target if step.shifted else 0.0
            twin.grad = gradient + drawn
    if step.max_norm is not None:
        nn.utils.clip_grad_norm_([twin for twin, _ in reached], step.max_norm)
    change = torch.zeros_like(steps.weights)
    for number, twin in enumerate(twins):
        if twin.grad is not None:
            start = steps.parameters[number].storage_offset() - steps.weights.storage_offset()
            window = change[start : start + twin.numel()].view(twin.shape)
            velocity = steps.vectors.velocity[start : start + twin.numel()].view(twin.shape)
            gradient = twin.grad + step.weight_decay * twin.detach()
            window.copy_(-rate * (step.momentum * velocity + gradient))
    return change


def _cuda(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.device.type == "cuda" else []
