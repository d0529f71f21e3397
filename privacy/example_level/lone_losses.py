"""Whether a batch's loss is made of its examples' own: checked in every batch, for little.

DP-SGD needs a loss to which each example contributes by itself. A mean weighted by class or by tokens is
none: its denominator depends on all examples of the batch, so that one more of them moves the gradient of
every other before it is clipped, and the sum by more than C. Here the loss of each example is computed again,
from the model's output for it alone, and compared with the batch's. Values are compared, to a relative 1e-5:
that a criterion whose values agree has gradients which agree is assumed. A batch that does not agree ends the
training before anything of it is released; that it did is not hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.errors import PrivacyError
from roundtable.privacy.example_level.per_example_clipping import LossFunction

_TOLERANCE = 1e-5
_ADVICE = (
    "return one loss for each example, which none of the others changes, for example by reduction='none' "
    "(and the mean over its own tokens), without weights that a batch normalises"
)


def checked(loss_fn: LossFunction) -> LossFunction:
    """`loss_fn`, raising PrivacyError for a batch of which the loss is not that of its examples."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        outputs: list[Any] = []
        handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            loss = loss_fn(model, batch)
        finally:
            handle.remove()
        _compare(loss_fn, model, batch, outputs, loss)
        return loss

    return loss_of


def _compare(loss_fn: LossFunction, model: nn.Module, batch: Any, outputs: list[Any], loss: Tensor) -> None:
    size = _size_of(batch)
    if loss.shape not in ((), (size,)):
        raise PrivacyError(
            f"the loss has shape {tuple(loss.shape)} for a batch of {size}: return the mean over the "
            "examples, or one loss for each"
        )
    if size == 1 and loss.dim() == 0:
        return
    with torch.no_grad():
        alone = _losses_alone(loss_fn, model, batch, outputs, size)
        finite = alone.isfinite()
        if not bool(finite.all()):
            # Clipping leaves examples without a finite gradient out: the others are compared.
            if not bool(finite.any()):
                return
            batch, outputs = _mapped(lambda leaf: leaf[finite], (batch, outputs))
            alone, loss = alone[finite], loss_fn(_Replay(model, outputs), batch)
    given, alone = loss.detach().double(), alone.double()
    expected = alone.mean() if loss.dim() == 0 else alone
    difference = ((given - expected).abs() / alone.abs().mean().clamp_min(1e-30)).max()
    if not difference <= _TOLERANCE:
        raise PrivacyError(
            f"the loss of a batch differs from those of its examples by {float(difference):.2g} of their "
            "size: it is no mean over the examples, so that one of them changes the gradients of the others, "
            f"and the noise is too little; {_ADVICE}"
        )


def _losses_alone(
    loss_fn: LossFunction, model: nn.Module, batch: Any, outputs: list[Any], size: int
) -> Tensor:
    """Each example's loss, [size]: of its own part of the batch, and of the model's outputs for it."""
    if not outputs:
        raise PrivacyError(
            "the loss does not call the model that it is given, so that it cannot be checked that each "
            "example has a loss of its own: call model(...), not its parts"
        )

    def one(own_batch: Any, own_outputs: Any) -> Tensor:
        grouped = _mapped(lambda part: part.unsqueeze(0), (own_batch, own_outputs))
        loss = loss_fn(_Replay(model, grouped[1]), grouped[0])
        return loss.reshape(())

    parts = (batch, outputs)
    if any(leaf.dim() == 0 or leaf.shape[0] != size for leaf in _leaves(parts)):
        raise PrivacyError(
            f"a batch of {size} examples, or what the model makes of it, holds a tensor whose first "
            "dimension is another: no example's part of it can be told"
        )
    try:
        return torch.vmap(one, randomness="different")(*_mapped(torch.Tensor.detach, parts))
    except (RuntimeError, ValueError, TypeError):
        # Not every operation is known to vmap: then one example after the other, which takes longer.
        each = [
            one(*_mapped(lambda leaf, place=place: leaf[place].detach(), parts))  # type: ignore[misc]
            for place in range(size)
        ]
        return torch.stack(each)


class _Replay(nn.Module):
    """Gives what the model gave, call by call; in all else it is the model."""

    def __init__(self, model: nn.Module, outputs: list[Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_original", model)
        object.__setattr__(self, "_left", list(outputs))

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_original"), name)

    @override
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The next of the outputs."""
        left: list[Any] = object.__getattribute__(self, "_left")
        if not left:
            raise PrivacyError("the loss calls the model more often for one example than for a batch")
        return left.pop(0)


def _size_of(batch: Any) -> int:
    for leaf in _leaves(batch):
        if leaf.dim():
            return int(leaf.shape[0])
    raise PrivacyError(
        f"a batch of type {type(batch).__name__} holds no tensor: no example can be told apart"
    )


def _leaves(values: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(leaf: Tensor) -> Tensor:
        found.append(leaf)
        return leaf

    _mapped(keep, values)
    return found


def _mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The same structure of tuples, lists and dicts with every tensor changed. PrivacyError for another."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        items = {key: _mapped(change, value) for key, value in values.items()}
        return items if type(values) is dict else type(values)(**items)
    if isinstance(values, tuple | list):
        inner = [_mapped(change, value) for value in values]
        return type(values)(*inner) if hasattr(values, "_fields") else type(values)(inner)
    if values is None or isinstance(values, str | int | float | bool):
        return values
    raise PrivacyError(
        f"a value of type {type(values).__name__} in a batch, or in the model's output, has no part for each "
        "example: use tensors, and tuples, lists and dicts of them"
    )
