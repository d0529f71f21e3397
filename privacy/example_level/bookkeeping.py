"""Clipped gradient sums by book-keeping: one backward pass, no gradient of any parameter computed twice.

Forward hooks keep every layer's input and put an identity after its output whose backward keeps the
output's gradient. With the parameters frozen for the pass, autograd computes those gradients and
nothing else; `layers` turns them into norms and one weighted sum (Bu et al. 2023, Algorithm 1). What is
frozen anyway, as the base under low-rank adapters is, has no hook, no norm and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from roundtable.privacy.example_level.attention import attend, objection_to, without_fast_path
from roundtable.privacy.example_level.layers import POSITIONS_MAY_LEAD, RULES, Use
from roundtable.privacy.example_level.parameter_gradients import ParameterGradient, joined
from roundtable.privacy.example_level.per_example_clipping import (
    LossFunction,
    Sums,
    UnsupportedModel,
    clip_factors,
    sum_loss,
)


@dataclass
class _Record:
    """What went into a layer, whose gradients it will have, and how they come from both."""

    owner: nn.Module
    rule: Callable[[Tensor, Tensor], Iterator[Use]]
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
    """Our own way to clipped sums, for models made of the layers in `RULES` and `nn.MultiheadAttention`.

    A parameter may be used more than once, by one layer or by two: the norm is that of the sum. Raises
    `UnsupportedModel` at construction for trainable parameters elsewhere.
    """

    name = "bookkeeping"

    def __init__(self, model: nn.Module, loss_fn: LossFunction, clip_norm: float) -> None:
        _check(model)
        self._model = model
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._anchor = torch.zeros((), requires_grad=True)
        self._records: list[_Record] = []
        self._axes: dict[nn.Module, int] = {}
        self._listening = False
        self._attentions = list(_attentions(model))
        for module in self._attentions:
            self._axes[module] = 0
            module.forward = partial(self._attend, module)  # type: ignore[method-assign]
        ruled = [m for m in model.modules() if type(m) in RULES and _own_trainable(m)]
        self._handles: list[RemovableHandle] = [m.register_forward_hook(self._after) for m in ruled]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._attentions:
            del module.forward
        self._attentions.clear()

    def accumulate(self, batch: Any, size: int, sums: Sums) -> None:
        """Adds Σ min(1, C/‖gᵢ‖) gᵢ over the `size` examples of a batch to `sums`."""
        self._records.clear()
        with self._pass(), without_fast_path():
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
        for use in gradients:
            total = sums[use.parameter]
            use.gradient.add_to(total if use.rows is None else total[slice(*use.rows)], factors)

    def _gradients(self, size: int, without: Tensor | None = None) -> list[Use]:
        """One for each parameter, or part of it, that the loss depends on."""
        uses: list[Use] = []
        for record in self._records:
            if record.gradient is None:
                continue
            inputs, gradient = record.inputs, record.gradient
            _check_precision(record, gradient)
            if self._axis(record, gradient, size):
                inputs, gradient = inputs.transpose(0, 1), gradient.transpose(0, 1)
            if without is not None:
                inputs, gradient = _zeroed(inputs, without), _zeroed(gradient, without)
            uses += record.rule(inputs, gradient)
        return _joined(uses)

    def _axis(self, record: _Record, gradient: Tensor, size: int) -> int:
        """Which dimension is the batch: the first, or the second of a layer over positions.

        A layer keeps the one that its first batch showed, since a batch may be as large as a sequence is
        long. Whoever attaches this compares that first batch's sums with those of single examples.
        """
        module = record.owner
        shape, second = tuple(gradient.shape), isinstance(module, POSITIONS_MAY_LEAD)
        if module not in self._axes:
            self._axes[module] = int(
                shape[0] != size and second and len(shape) > 2 and shape[1] == size == record.inputs.shape[1]
            )
        axis = self._axes[module]
        if record.inputs.shape[axis] != size or shape[axis] != size:
            raise UnsupportedModel(
                f"{type(module).__name__} has an input of shape {tuple(record.inputs.shape)} for a batch of "
                f"{size}: " + ("its first dimension is not the batch" if axis == 0 else "the batch has moved")
            )
        return axis

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

    def _after(self, module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
        if not self._listening:
            return None
        return self._keep(module, inputs[0], output, partial(RULES[type(module)], module))

    def _attend(self, module: nn.MultiheadAttention, *inputs: Any, **options: Any) -> Any:
        if not self._listening:
            return nn.MultiheadAttention.forward(module, *inputs, **options)
        return attend(module, partial(self._keep, module), *inputs, **options)

    def _keep(
        self,
        owner: nn.Module,
        inputs: Tensor,
        output: Tensor,
        rule: Callable[[Tensor, Tensor], Iterator[Use]],
    ) -> Tensor:
        record = _Record(owner, rule, inputs.detach())
        self._records.append(record)
        tapped: Tensor = _Tap.apply(output, self._anchor, record)  # type: ignore[no-untyped-call]
        return tapped


def objection(module: nn.Module) -> str | None:
    """What book-keeping has against a layer, itself without those inside it; None if it knows what to do."""
    if not _own_trainable(module):
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        return "uses max_norm, sparse or scale_grad_by_freq"
    if type(module) is nn.MultiheadAttention:
        return objection_to(module)
    return None if type(module) in RULES else "has parameters that book-keeping knows no rule for"


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if reason := objection(module):
            place = f"{name or 'the model itself'} ({type(module).__name__})"
            raise UnsupportedModel(f"{place} {reason}")


def _check_precision(record: _Record, gradient: Tensor) -> None:
    """A norm from fewer bits than the parameters have could be too small."""
    own = next(record.owner.parameters()).dtype
    kinds = {own, gradient.dtype} | ({record.inputs.dtype} if record.inputs.is_floating_point() else set())
    if len(kinds) > 1:
        raise UnsupportedModel(
            f"{type(record.owner).__name__} computes in mixed precision "
            f"({', '.join(sorted(map(str, kinds)))}): leave autocast out of the model and its loss"
        )


def _joined(uses: Sequence[Use]) -> list[Use]:
    """One for each parameter; rows of it that are used apart stay apart, since their norms add up."""
    groups: dict[tuple[nn.Parameter, tuple[int, int] | None], list[ParameterGradient]] = {}
    for use in uses:
        groups.setdefault((use.parameter, use.rows), []).append(use.gradient)
    for parameter, rows in groups:
        for other, theirs in groups:
            if other is parameter and rows != theirs and _overlap(rows, theirs):
                raise UnsupportedModel("a packed weight is used twice, in parts that overlap")
    return [Use(parameter, joined(each), rows) for (parameter, rows), each in groups.items()]


def _overlap(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is None or other is None or max(one[0], other[0]) < min(one[1], other[1])


def _norms(gradients: Sequence[Use]) -> Tensor:
    squares = torch.stack([use.gradient.squared_norms() for use in gradients]).sum(0)
    return squares.clamp_min(0).sqrt()


def _zeroed(tensor: Tensor, rows: Tensor) -> Tensor:
    """NaN times a factor of 0 is NaN: what an example without a finite gradient left must go altogether."""
    return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)


def _attentions(model: nn.Module) -> Iterator[nn.MultiheadAttention]:
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and any(p.requires_grad for p in module.parameters()):
            yield module


def _own_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))
