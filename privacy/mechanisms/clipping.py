"""Bounding what one contribution can change: the norm of its flat vector.

A silo clips what it sends, and whoever adds the noise clips again: the bound that the noise relies
on must not rest on the honesty of the party that it is meant to bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roundtable.core.errors import InvalidUpdate, PrivacyError

_BLOCK = 1 << 20
# A float32 product rounds each entry by up to 2^-24 of it: without this a clipped norm could pass C.
_ROUNDING_MARGIN = 1.0 - 2.0**-22


@dataclass(frozen=True)
class Clipped:
    """A clipped vector; `norm` is what it was before, `was_clipped` the bit of Andrew et al. 2021."""

    vector: Tensor
    norm: float
    was_clipped: bool


def l2_norm(vector: Tensor) -> float:
    """The L2 norm of a flat vector, accumulated in float64 in bounded memory. NaN or ±inf if any entry is."""
    total = 0.0
    for start in range(0, vector.numel(), _BLOCK):
        block = vector[start : start + _BLOCK].to(torch.float64)
        total += float(torch.dot(block, block))
    return math.sqrt(total)


def clip_factor(norm: float, clip_norm: float) -> float:
    """min(1, C / norm), kept a hair below so that rounding to float32 cannot lift the result above C."""
    if norm <= clip_norm * _ROUNDING_MARGIN:
        return 1.0
    return clip_norm / norm * _ROUNDING_MARGIN


def clip(vector: Tensor, clip_norm: float) -> Clipped:
    """Scales a flat vector `[d]` so that its L2 norm is at most `clip_norm` (C).

    Raises `InvalidUpdate` (`non_finite`) for a vector with NaN or infinity, which no scaling bounds.
    """
    _check_clip_norm(clip_norm)
    norm = _finite_norm(vector)
    factor = clip_factor(norm, clip_norm)
    return Clipped(vector if factor == 1.0 else vector * factor, norm, norm > clip_norm)


def clip_per_layer(vector: Tensor, slices: Sequence[slice], clip_norm: float) -> Clipped:
    """Clips each slice to `clip_norm` / √L, so that the whole is within `clip_norm` (McMahan et al. 2018).

    `slices` are the L layers' places in the flat vector; together they must cover it exactly once.
    Raises `PrivacyError` for slices that do not, `InvalidUpdate` for a vector that is not finite.
    """
    _check_clip_norm(clip_norm)
    _check_cover(slices, vector.numel())
    norm = _finite_norm(vector)
    share = clip_norm / math.sqrt(len(slices))
    result = torch.empty_like(vector)
    was_clipped = False
    for part in slices:
        layer_norm = l2_norm(vector[part])
        was_clipped |= layer_norm > share
        torch.mul(vector[part], clip_factor(layer_norm, share), out=result[part])
    return Clipped(result, norm, was_clipped)


@dataclass(frozen=True)
class AdaptiveClip:
    """The clip norm that follows a quantile of the update norms (Andrew et al. 2021, Algorithm 1).

    The share of updates within the bound is itself learnt from private data: it gets Gaussian noise
    of standard deviation `bit_noise` on a sum of bits centred at ½ (so that one silo moves it by at
    most ½), and `bit_noise_multiplier` is what the round's charge must list beside the update.
    `expected_cohort` is the fixed denominator, never the number that answered.
    """

    clip_norm: float
    quantile: float
    learning_rate: float
    bit_noise: float
    expected_cohort: float

    def __post_init__(self) -> None:
        _check_clip_norm(self.clip_norm)
        if not 0.0 < self.quantile < 1.0:
            raise PrivacyError(f"the clip quantile is {self.quantile}: it must lie between 0 and 1")
        if self.bit_noise <= 0.0 or self.expected_cohort <= 0.0 or self.learning_rate <= 0.0:
            raise PrivacyError(
                "bit_noise, expected_cohort and learning_rate of adaptive clipping must be above 0"
            )

    @classmethod
    def init(
        cls, clip_norm: float, expected_cohort: float, quantile: float = 0.5, learning_rate: float = 0.2
    ) -> AdaptiveClip:
        """Starts with the paper's σ_b = m/20, a noise that costs next to nothing (section 3.1)."""
        return cls(clip_norm, quantile, learning_rate, max(expected_cohort / 20.0, 1.0), expected_cohort)

    @property
    def bit_noise_multiplier(self) -> float:
        """Noise over sensitivity: the sensitivity of a sum of bits centred at ½ is ½."""
        return 2.0 * self.bit_noise

    def apply(self, within: float, noise: float) -> AdaptiveClip:
        """The next state.

        `within` is the sum over silos that answered of (bit − ½), the bit being 1 for a norm at most
        `clip_norm`; `noise` is a standard normal draw from the round's noise source. Geometric update
        C ← C · exp(−η (b̃ − γ)): too many within the bound makes the bound smaller.
        """
        share = (within + self.bit_noise * noise) / self.expected_cohort + 0.5
        return replace(
            self, clip_norm=self.clip_norm * math.exp(-self.learning_rate * (share - self.quantile))
        )


def _finite_norm(vector: Tensor) -> float:
    if vector.dim() != 1 or not vector.is_floating_point():
        raise InvalidUpdate(
            "layout", f"a flat floating-point vector is needed, not {vector.dtype} {tuple(vector.shape)}"
        )
    norm = l2_norm(vector)
    if not math.isfinite(norm):
        raise InvalidUpdate(
            "non_finite", "the update holds NaN or infinity; clipping cannot bound it, so it is refused"
        )
    return norm


def _check_clip_norm(clip_norm: float) -> None:
    if not (math.isfinite(clip_norm) and clip_norm > 0.0):
        raise PrivacyError(f"the clip norm is {clip_norm}: it must be a finite number above 0")


def _check_cover(slices: Sequence[slice], length: int) -> None:
    covered = 0
    for part in sorted(slices, key=lambda part: part.start):
        if part.start != covered or part.stop <= part.start or part.step not in (None, 1):
            break
        covered = part.stop
    if covered != length or not slices:
        raise PrivacyError(
            f"the {len(slices)} slices for clipping by layer do not cover a vector of {length} exactly once; "
            "take them from the layout"
        )
