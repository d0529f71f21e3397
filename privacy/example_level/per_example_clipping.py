"""What every way to clip per-example gradients shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundtable.core.errors import PrivacyError

LossFunction = Callable[[nn.Module, Any], Tensor]
Sums = dict[nn.Parameter, Tensor]


class UnsupportedModel(PrivacyError):
    """This way to per-example gradients cannot do this model; another may."""


class ClippedSum(Protocol):
    """A way to add up clipped per-example gradients."""

    @property
    def name(self) -> str:
        """How a report calls it."""

    def accumulate(self, batch: Any, size: int, sums: Sums) -> None:
        """Adds Σ min(1, C/‖gᵢ‖) gᵢ over the `size` examples of `batch` to `sums`."""

    def close(self) -> None:
        """Leaves the model as it was found."""


def sum_loss(loss: Tensor, size: int) -> Tensor:
    """The summed loss of a loss function that gives the batch's mean, or one loss for each example."""
    if loss.dim() == 0:
        return loss * size
    if loss.shape == (size,):
        return loss.sum()
    raise PrivacyError(
        f"the loss has shape {tuple(loss.shape)} for a batch of {size}: return the mean over the examples, "
        "or one loss for each"
    )


def clip_factors(norms: Tensor, clip_norm: float) -> tuple[Tensor, Tensor | None]:
    """(min(1, C / norm), None); where norms are not finite, factor 0 for those, and which they are."""
    factors = (clip_norm * (1.0 - 1e-6) / norms.clamp_min(1e-30)).clamp_max_(1.0)
    finite = torch.isfinite(norms)
    if bool(finite.all()):
        return factors, None
    return torch.where(finite, factors, torch.zeros_like(factors)), ~finite
