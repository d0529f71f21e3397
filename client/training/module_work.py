"""An algorithm's own gradients over a module that holds one client's weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.training.algorithm_round import AlgorithmRound
from roundtable.client.training.batches import Batch
from roundtable.core.algorithms.gradient_work import Gradients, Objective
from roundtable.core.algorithms.passes import without_statistics
from roundtable.core.layout import Layout
from roundtable.core.task import Task


class ModuleWork:
    """A `GradientWork` of each step of a round; `backward(batch)` makes the gradients of the task's loss."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        rules: AlgorithmRound,
        layout: Layout,
        backward: Callable[[Batch], Tensor],
    ) -> None:
        self.task = task
        self.module = module
        self.phase: Hashable = None
        self._parameters = parameters
        self._rules = rules
        self._layout = layout
        self._backward = backward
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.names = [names[id(parameter)] for parameter in parameters]
        self._places: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._models, self._figures = self._begun(rules.held)
        self._now: Batch | None = None
        self._before: Batch | None = None

    def _begun(self, held: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Held models as tensors by name, what does not travel as the client's own; and scalars."""
        models, figures = {}, {}
        for name, value in held.items():
            if not value.dim():
                figures[name] = value.to(self._parameters[0].device, copy=True)
                continue
            models[name] = {key: place.detach().clone() for key, place in self._places.items()}
            for key, tensor in self._layout.unflatten(value).items():
                if key in models[name]:
                    models[name][key].copy_(tensor)
        return models, figures

    @torch.no_grad()
    def take(self, batch: Batch) -> tuple[Tensor, Gradients]:
        """Loss and gradients of the next step."""
        self._before, self._now = self._now, batch
        return self._rules.algorithm.gradients(self)

    def ended(self) -> dict[str, Tensor]:
        """What is held after the last step, as it was given: vectors [d] and scalars, on CPU."""
        models = {name: self._layout.flatten(model).cpu() for name, model in self._models.items()}
        return models | {name: figure.cpu() for name, figure in self._figures.items()}

    @property
    def batch(self) -> Any:
        assert self._now is not None
        return self._now.data

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    def held(self, name: str) -> list[Tensor]:
        return [self._models[name][key] for key in self.names]

    def figure(self, name: str) -> Tensor:
        return self._figures[name]

    def gradients(
        self,
        at: Sequence[Tensor] | None = None,
        *,
        earlier: bool = False,
        held: str | None = None,
        of: Objective | None = None,
        statistics: bool = True,
    ) -> tuple[Tensor, Gradients]:
        batch = self._before if earlier else self._now
        assert batch is not None
        values = {} if at is None else dict(zip(self.names, at, strict=True))
        if held is not None:
            own = dict(self.module.named_buffers())
            values |= {key: value for key, value in self._models[held].items() if key in own}
        still = nullcontext() if statistics else without_statistics(self.module)
        with torch.enable_grad(), self._holding(values), still:
            self._forget()
            if of is None:
                loss = self._backward(batch)
            else:
                loss = of(self.module, batch.data)
                loss.backward()  # type: ignore[no-untyped-call]
        found = [parameter.grad for parameter in self._parameters]
        self._forget()
        return loss.detach(), found

    def loss(self) -> Tensor:
        with without_statistics(self.module):
            return self.task.loss(self.module, self.batch)

    def evaluated(self, held: str, function: Objective) -> Tensor:
        modes = [(layer, layer.training) for layer in self.module.modules()]
        with self._holding(self._models[held]):
            self.module.eval()
            try:
                return function(self.module, self.batch)
            finally:
                for layer, mode in modes:
                    layer.training = mode

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def _holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """The module with these tensors in the place of its own."""
        before = {name: self._places[name].data for name in values}
        for name, value in values.items():
            self._places[name].data = value
        try:
            yield
        finally:
            for name, value in before.items():
                self._places[name].data = value
