"""Clipped gradient sums by book-keeping: one backward pass, no gradient of any parameter computed twice.

Forward hooks keep every layer's input and put an identity after its output whose backward keeps the
output's gradient. With the parameters frozen for the pass, autograd computes those gradients and
nothing else; `layers` turns them into norms and one weighted sum (Bu et al. 2023, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from roundtable.privacy.example_level import layers
from roundtable.privacy.example_level.per_example_clipping import (
    LossFunction,
    UnsupportedModel,
    clip_factors,
    sum_loss,
)

Handler = Callable[[Any, Tensor, Tensor], layers.LayerGradient]

HANDLERS: dict[type[nn.Module], Handler] = {
    nn.Linear: layers.linear,
    nn.Conv1d: layers.convolution,
    nn.Conv2d: layers.convolution,
    nn.Embedding: layers.embedding,
    nn.GroupNorm: layers.group_norm,
    nn.LayerNorm: layers.layer_norm,
    nn.RMSNorm: layers.rms_norm,
}


@dataclass
class _Record:
    module: nn.Module
    inputs: Tensor
    gradient: Tensor | None = None


class _Tap(torch.autograd.Function):
    """The identity; its backward leaves the gradient in the record. `anchor` makes the graph start here."""

    @staticmethod
    @override
    def forward(ctx: Any, output: Tensor, anchor: Tensor, record: _Record) -> Tensor:
        ctx.record = record
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:
        (gradient,) = gradients
        ctx.record.gradient = gradient
        return (gradient if ctx.needs_input_grad[0] else None), None, None


class BookKeeping:
    """Our own way to clipped sums, for models made of the layers in `HANDLERS`.

    Raises `UnsupportedModel` at construction for trainable parameters elsewhere, or shared by two layers.
    """

    name = "bookkeeping"

    def __init__(self, model: nn.Module, loss_fn: LossFunction, clip_norm: float) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._modules = _check(model)
        self._anchor = torch.zeros((), requires_grad=True)
        self._records: list[_Record] = []
        self._listening = False
        self._handles: list[RemovableHandle] = [m.register_forward_hook(self._keep) for m in self._modules]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def accumulate(self, batch: Any, size: int, sums: dict[nn.Parameter, Tensor]) -> None:
        """Adds Σ min(1, C/‖gᵢ‖) gᵢ over the `size` examples of a batch to `sums`."""
        self._records.clear()
        with self._pass():
            loss = sum_loss(self._loss_fn(self._model, batch), size)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        gradients = self._gradients(size)
        if not gradients:
            return
        factors, bad = clip_factors(_norms(gradients), self._clip_norm)
        if bad is not None:
            gradients = self._gradients(size, without=bad)
            _norms(gradients)
        self._records.clear()
        for gradient in gradients:
            gradient.add_to(sums, factors)

    def _gradients(self, size: int, without: Tensor | None = None) -> list[layers.LayerGradient]:
        seen: set[int] = set()
        result = []
        for record in self._records:
            if record.gradient is None:
                continue
            if id(record.module) in seen:
                raise UnsupportedModel("a layer is used twice in one forward pass")
            seen.add(id(record.module))
            if record.inputs.shape[0] != size or record.gradient.shape[0] != size:
                raise UnsupportedModel(
                    f"{type(record.module).__name__} has an input of shape {tuple(record.inputs.shape)} "
                    f"for a batch of {size}: its first dimension is not the batch"
                )
            inputs, gradient = record.inputs, record.gradient
            if without is not None:
                inputs, gradient = _zeroed(inputs, without), _zeroed(gradient, without)
            result.append(HANDLERS[type(record.module)](record.module, inputs, gradient))
        return result

    @contextmanager
    def _pass(self) -> Iterator[None]:
        self._listening = True
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            self._listening = False
            for parameter in self._parameters:
                parameter.requires_grad_(True)

    def _keep(self, module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
        if not self._listening:
            return None
        record = _Record(module, inputs[0].detach())
        self._records.append(record)
        tapped: Tensor = _Tap.apply(output, self._anchor, record)  # type: ignore[no-untyped-call]
        return tapped


def _norms(gradients: Sequence[layers.LayerGradient]) -> Tensor:
    return torch.stack([gradient.squared_norms() for gradient in gradients]).sum(0).sqrt()


def _zeroed(tensor: Tensor, rows: Tensor) -> Tensor:
    """NaN times a factor of 0 is NaN: what an example without a finite gradient left must go altogether."""
    return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)


def _check(model: nn.Module) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    owners: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not own:
            continue
        place = f"{name or 'the model itself'} ({type(module).__name__})"
        if type(module) not in HANDLERS:
            raise UnsupportedModel(f"{place} has parameters that book-keeping knows no rule for")
        if isinstance(module, nn.Embedding) and (
            module.max_norm or module.sparse or module.scale_grad_by_freq
        ):
            raise UnsupportedModel(f"{place} uses max_norm, sparse or scale_grad_by_freq")
        if any(id(p) in owners for p in own):
            raise UnsupportedModel(f"{place} shares a parameter with another layer")
        owners.update(id(p) for p in own)
        chosen.append(module)
    return chosen
