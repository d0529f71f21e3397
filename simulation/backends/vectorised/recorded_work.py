"""What a recorded step makes its gradient of: the task's loss, or an algorithm's own gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from roundtable.core.algorithms.gradient_work import Gradients, Objective
from roundtable.core.algorithms.passes import without_statistics
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.layout import Layout
from roundtable.core.task import Task
from roundtable.simulation.backends.vectorised.recording import Unrecordable


@dataclass(frozen=True)
class Manner:
    """How a step is taken: by which rule, and whether on the algorithm's own gradients, in which phase."""

    step: LocalStep
    own: bool = False
    phase: Hashable = None


class Loss(nn.Module):
    """`Task.loss`, or another function of model and batch, as a module, so that it can be called with other
    tensors in the model's place."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.task = task

    @override
    def forward(self, batch: Any, of: Objective | None = None, scalar: bool = True) -> Tensor:
        """The loss [] of a batch; of a function that need be no `scalar` whatever it gives."""
        loss = self.task.loss(self.model, batch) if of is None else of(self.model, batch)
        if scalar and (not isinstance(loss, Tensor) or loss.dim() != 0):
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise Unrecordable(f"{type(self.task).__name__}.loss() returned {shape}, not a scalar tensor")
        return loss


class HeldVectors:
    """What clients hold beside their models, one client after the other in the same memory."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self.values: dict[str, Tensor] = {}
        self._views: dict[str, Mapping[str, Tensor]] = {}

    def begin(self, held: Mapping[str, Tensor]) -> None:
        """The next client's; the first one's names and shapes are those of all."""
        for name, value in held.items():
            if name not in self.values:
                self.values[name] = torch.zeros(value.shape, device=self._device)
                if value.dim():
                    self._views[name] = self._layout.unflatten(self.values[name])
            self.values[name].copy_(value)

    def ended(self) -> dict[str, Tensor]:
        """Copies of what there is now, on CPU."""
        return {name: value.to("cpu", copy=True) for name, value in self.values.items()}

    def model(self, name: str) -> Mapping[str, Tensor]:
        """A held vector's tensors by name, where they lie."""
        return self._views[name]


class RecordedWork:
    """A `GradientWork` over tensors that lie outside of the model."""

    def __init__(
        self,
        loss: Loss,
        names: Sequence[str],
        weights: Sequence[Tensor],
        batches: Sequence[Any],
        held: HeldVectors,
        phase: Hashable = None,
    ) -> None:
        """`batches`: the step's, and the one before it where that is looked at."""
        self.module = loss.model
        self.task = loss.task
        self.names = names
        self.weights = weights
        self.batch = batches[0]
        self.phase = phase
        self._loss = loss
        self._batches = batches
        self._held = held

    def held(self, name: str) -> list[Tensor]:
        return [self._held.model(name)[key] for key in self.names]

    def figure(self, name: str) -> Tensor:
        return self._held.values[name]

    def gradients(
        self,
        at: Sequence[Tensor] | None = None,
        *,
        earlier: bool = False,
        held: str | None = None,
        of: Objective | None = None,
        statistics: bool = True,
    ) -> tuple[Tensor, Gradients]:
        leaves = [value.detach().requires_grad_() for value in (self.weights if at is None else at)]
        state = {f"model.{name}": leaf for name, leaf in zip(self.names, leaves, strict=True)}
        if held is not None:
            buffers = {name for name, _ in self.module.named_buffers()}
            views = self._held.model(held)
            state |= {f"model.{name}": value for name, value in views.items() if name in buffers}
        still = nullcontext() if statistics else without_statistics(self.module)
        counts = nullcontext() if held is None else _uncounted(self.module)
        with torch.enable_grad(), still, counts:
            loss = functional_call(self._loss, state, (self._batches[earlier], of))
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return loss.detach(), list(found)

    def loss(self) -> Tensor:
        state = {f"model.{name}": value for name, value in zip(self.names, self.weights, strict=True)}
        with without_statistics(self.module):
            found: Tensor = functional_call(self._loss, state, (self.batch,))
        return found

    def evaluated(self, held: str, function: Objective) -> Tensor:
        state = {f"model.{name}": value for name, value in self._held.model(held).items()}
        modes = [(layer, layer.training) for layer in self.module.modules()]
        self.module.eval()
        try:
            found: Tensor = functional_call(self._loss, state, (self.batch, function, False))
        finally:
            for layer, mode in modes:
                layer.training = mode
        return found


@contextmanager
def _uncounted(module: nn.Module) -> Iterator[None]:
    """Within, a pass adds to no counter of a normalisation layer: it is another model's."""
    layers = [
        (layer, layer.num_batches_tracked)
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.momentum is not None
    ]
    for layer, _ in layers:
        layer.num_batches_tracked = None
    try:
        yield
    finally:
        for layer, counter in layers:
            layer.num_batches_tracked = counter
