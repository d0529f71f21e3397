"""Clipped gradient sums through Opacus: hooks, functorch, expanded weights, and ghost clipping.

Only Opacus's per-example gradients (or their norms) are used. Clipping, noise and the step are ours
for every mode, so that there is one place where they can be wrong.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.privacy.example_level.per_example_clipping import (
    LossFunction,
    UnsupportedModel,
    clip_factors,
    sum_loss,
)

INSTANTIATING = ("hooks", "functorch", "expanded_weights")
MODES = (*INSTANTIATING, "ghost")


def opacus_sum(mode: str, model: nn.Module, loss_fn: LossFunction, clip_norm: float) -> _PerExample | _Ghost:
    """Attaches one of `MODES` to the model. Raises `UnsupportedModel` where Opacus refuses."""
    kind = _Ghost if mode == "ghost" else _PerExample
    with _quiet(), _as_unsupported(mode):
        return kind(mode, model, loss_fn, clip_norm)


class _PerExample:
    def __init__(self, mode: str, model: nn.Module, loss_fn: LossFunction, clip_norm: float) -> None:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights

        self.name = mode
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if mode == "expanded_weights":
            self._wrapped = GradSampleModuleExpandedWeights(model)
            self._called: nn.Module = self._wrapped
        else:
            self._wrapped = GradSampleModule(model, force_functorch=mode == "functorch")
            self._called = model

    def close(self) -> None:
        _detach(self._wrapped, self._parameters)

    def accumulate(self, batch: Any, size: int, sums: dict[nn.Parameter, Tensor]) -> None:
        with _quiet(), _as_unsupported(self.name):
            loss = self._loss_fn(self._called, batch)
            (sum_loss(loss, size) / size).backward()  # type: ignore[no-untyped-call]
        each = {p: _single(p, size) for p in self._parameters}
        squares = [g.flatten(1).square().sum(1) for g in each.values()]
        factors, bad = clip_factors(torch.stack(squares).sum(0).sqrt(), self._clip_norm)
        for parameter, gradient in each.items():
            if bad is not None:
                gradient = gradient.masked_fill(bad.view(-1, *[1] * (gradient.dim() - 1)), 0.0)
            sums[parameter].add_((factors @ gradient.flatten(1)).view_as(parameter))
        _forget(self._parameters)


class _Ghost:
    """Norms in one backward pass, the weighted loss in a second; needs one loss for each example."""

    def __init__(self, mode: str, model: nn.Module, loss_fn: LossFunction, clip_norm: float) -> None:
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
            GradSampleModuleFastGradientClipping,
        )

        self.name = mode
        self._model = model
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=clip_norm)

    def close(self) -> None:
        _detach(self._wrapped, self._parameters)

    def accumulate(self, batch: Any, size: int, sums: dict[nn.Parameter, Tensor]) -> None:
        with _quiet(), _as_unsupported(self.name):
            losses = self._loss_fn(self._model, batch)
            if losses.shape != (size,):
                raise UnsupportedModel(
                    "ghost clipping needs a loss function that gives one loss for each example"
                )
            losses.mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            factors, bad = clip_factors(self._wrapped.get_norm_sample(), self._clip_norm)
            if bad is not None:
                losses = losses.masked_fill(bad, 0.0)
            _forget(self._parameters)
            self._wrapped.disable_hooks()
            try:
                (factors.detach() * losses).sum().backward()  # type: ignore[no-untyped-call]
            finally:
                self._wrapped.enable_hooks()
        for parameter in self._parameters:
            if parameter.grad is not None:
                sums[parameter].add_(torch.nan_to_num(parameter.grad))
        _forget(self._parameters)


def _single(parameter: nn.Parameter, size: int) -> Tensor:
    each = getattr(parameter, "grad_sample", None)
    if each is None:
        return torch.zeros(size, *parameter.shape, device=parameter.device, dtype=parameter.dtype)
    if not isinstance(each, Tensor) or each.shape[0] != size:
        raise UnsupportedModel("a parameter's per-example gradients do not have the batch as first dimension")
    return each.detach()


def _forget(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
        if hasattr(parameter, "grad_sample"):
            parameter.grad_sample = None


def _detach(wrapped: Any, parameters: list[nn.Parameter]) -> None:
    wrapped.remove_hooks()
    for parameter in parameters:
        for name in ("grad_sample", "_norm_sample", "_forward_counter", "_current_grad_sample"):
            if hasattr(parameter, name):
                delattr(parameter, name)
        parameter.grad = None
    for module in wrapped._module.modules():
        for name in ("activations", "max_batch_len"):
            # Its own alone: a module around another one may show what that one has, as peft's do.
            vars(module).pop(name, None)


@contextmanager
def _as_unsupported(mode: str) -> Iterator[None]:
    """What PyTorch and Opacus raise for a model that a mode cannot do has no common class but these."""
    try:
        yield
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError) as error:
        first_line = str(error).strip().split("\n")[0][:200]
        raise UnsupportedModel(f"Opacus cannot do this model by {mode}: {first_line}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("opacus")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
