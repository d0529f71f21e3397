"""What makes a model or a loss unfit for example-level privacy, said before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.core.errors import PrivacyError
from roundtable.core.initial_model import hooked_parameter
from roundtable.privacy.example_level.attention import without_fast_path
from roundtable.privacy.example_level.bookkeeping import objection
from roundtable.privacy.example_level.per_example_clipping import (
    ClippedSum,
    LossFunction,
    UnsupportedModel,
    clip_factors,
)

Fetch = Callable[[Tensor], Any]

_ADVICE: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (nn.modules.batchnorm._BatchNorm,),
        "it mixes the examples of a batch, so that no gradient belongs to one example, and its running "
        "statistics "
        "would leave without noise; use nn.GroupNorm(min(32, channels), channels), or let "
        "opacus.validators.ModuleValidator.fix(model) replace it",
    ),
    (
        (nn.modules.instancenorm._InstanceNorm,),
        "its running statistics would leave without noise; build it with track_running_stats=False, or "
        "use nn.GroupNorm",
    ),
)
# Frozen, these are functions of one example like any other.
_LEARNING_ADVICE: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (nn.RNN, nn.LSTM, nn.GRU),
        "use DPRNN, DPLSTM or DPGRU from opacus.layers, which have the same parameters",
    ),
    ((nn.EmbeddingBag,), "use nn.Embedding and average its output over the positions"),
)


def check_model(model: nn.Module) -> None:
    """Raises `PrivacyError` that lists every layer that cannot be used, each with what to use instead."""
    problems = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and not module.track_running_stats:
            continue
        learns = any(p.requires_grad for p in module.parameters())
        for kinds, advice in (*_ADVICE, *(_LEARNING_ADVICE if learns else ())):
            if isinstance(module, kinds) and type(module).__module__.startswith("torch."):
                problems.append(f"{name or 'the model'} is {type(module).__name__}: {advice}")
    if not any(p.requires_grad for p in model.parameters()):
        problems.append("the model has no trainable parameter")
    if (hooked := hooked_parameter(model)) is not None:
        problems.append(
            f"{hooked} has a hook on its gradient, and what it makes of that nothing clips; change in "
            "forward() what the gradient is of"
        )
    ours = [
        f"{name or 'the model'} is {type(module).__name__}, which {reason}"
        for name, module in model.named_modules()
        if (reason := objection(module))
    ]
    if not problems and ours and (theirs := _opacus_objections(model)):
        problems += ours + theirs
    if problems:
        raise PrivacyError("this model cannot be trained with example-level privacy: " + "; ".join(problems))


def _opacus_objections(model: nn.Module) -> list[str]:
    from opacus.validators import ModuleValidator

    was_training = model.training
    model.train()
    try:
        return [f"Opacus says: {error}" for error in ModuleValidator.validate(model, strict=False)]
    finally:
        model.train(was_training)


def sums_one_by_one(
    model: nn.Module, loss_fn: LossFunction, fetch: Fetch, examples: Sequence[int], clip_norm: float
) -> dict[nn.Parameter, Tensor]:
    """The clipped sum by one plain backward pass for each example: slow, and right by construction.

    Call it before anything is attached to the model. Dropout is off meanwhile.
    """
    sums = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
    for gradients in _one_by_one(model, loss_fn, fetch, examples):
        _add_clipped(sums, gradients, clip_norm)
    return sums


def clipping_norm(
    model: nn.Module, loss_fn: LossFunction, fetch: Fetch, examples: Sequence[int], clip_norm: float
) -> float:
    """A clip norm, no greater than the given one, by which more than half of the examples are clipped.

    Where none is, sums are right whatever is taken for an example's norm, and a check of them shows nothing.
    """
    norms = torch.stack([_norm(each) for each in _one_by_one(model, loss_fn, fetch, examples)])
    there = norms[norms.isfinite() & (norms > 0)]
    return min(clip_norm, float(there.median()) / 2) if len(there) else clip_norm


def check_sums(
    candidate: ClippedSum,
    model: nn.Module,
    expected: dict[nn.Parameter, Tensor],
    batch: Any,
    size: int,
) -> None:
    """Compares the candidate's clipped sum over a batch with `sums_one_by_one` over the same examples.

    It finds losses that are no mean over the examples, batches in another dimension, and layers that
    mix examples. Raises `UnsupportedModel` where they differ.
    """
    found = {p: torch.zeros_like(p) for p in expected}
    with _without_dropout(model):
        candidate.accumulate(batch, size, found)
    difference = sum(float((found[p] - expected[p]).double().square().sum()) for p in expected) ** 0.5
    scale = sum(float(total.double().square().sum()) for total in expected.values()) ** 0.5
    if not difference <= 1e-3 * max(scale, 1e-12):
        raise UnsupportedModel(
            f"by {candidate.name} the clipped gradients of {size} examples together differ from those of "
            f"each alone by {difference / max(scale, 1e-30):.2g} of their size: either the loss is not the "
            "mean over the examples (a mean over tokens is not), or a layer mixes the examples of a batch, "
            "or a parameter is used outside the layer that it belongs to (call the layer)"
        )


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for modules without parameters of their own: Opacus needs the others in training."""
    off = [m for m in model.modules() if m.training and not any(True for _ in m.parameters(recurse=False))]
    attentions = {m: m.dropout for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for module in off:
        module.training = False
    for attention in attentions:
        attention.dropout = 0.0
    try:
        with without_fast_path():
            yield
    finally:
        for module in off:
            module.training = True
        for attention, dropout in attentions.items():
            attention.dropout = dropout


def _one_by_one(
    model: nn.Module, loss_fn: LossFunction, fetch: Fetch, examples: Sequence[int]
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Each example's gradient, of the parameters that its loss depends on."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with _without_dropout(model):
        for example in examples:
            loss = loss_fn(model, fetch(torch.tensor([example]))).mean()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            yield {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}


def _norm(gradients: dict[nn.Parameter, Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(())
    return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()


def _add_clipped(
    sums: dict[nn.Parameter, Tensor], gradients: dict[nn.Parameter, Tensor], clip_norm: float
) -> None:
    factors, bad = clip_factors(_norm(gradients).view(1), clip_norm)
    if bad is None:
        for parameter, gradient in gradients.items():
            sums[parameter].add_(gradient * factors[0])
