"""The Gaussian mechanism over a flat vector: at the coordinator on a sum, or at a silo on its own update.

What is done about floating point (Mironov 2012): value plus noise is computed in float64 and rounded
to a grid of a power of two at least 2^-20 of the standard deviation wide, some 2^32 float64 steps to
a cell, so which points can occur no longer depends on the value beneath the noise. What follows
(division, float32) is a function of that rounded result. This is a mitigation, not a proof; where
exactness is demanded, the discrete mechanisms of `distributed` give it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.privacy.clipping import clip
from roundtable.privacy.noise import NoiseSource, standard_normal

_BLOCK = 1 << 18
_GRID_BITS = 20


@dataclass(frozen=True)
class NoisyVector:
    """A vector that has its noise; `guarantee` is False where the noise could be repeated."""

    vector: Tensor
    standard_deviation: float
    guarantee: bool


def noise_grid(standard_deviation: float) -> float:
    """The largest power of two that is at most 2^-20 of the standard deviation."""
    return 2.0 ** (math.floor(math.log2(standard_deviation)) - _GRID_BITS)


def gaussian_block(values: Tensor, standard_deviation: float, source: NoiseSource) -> Tensor:
    """float64 `values` plus noise, rounded to `noise_grid`."""
    return with_noise(values, standard_deviation, standard_normal(source, values.numel()))


def with_noise(values: Tensor, standard_deviation: float, normal: Tensor) -> Tensor:
    """`values` plus σ times the standard normal draws (float64, overwritten), rounded to `noise_grid`."""
    grid = noise_grid(standard_deviation)
    return in_grid_steps(values, standard_deviation, normal).mul_(grid)


def in_grid_steps(values: Tensor, standard_deviation: float, normal: Tensor) -> Tensor:
    """The same in units of the grid: whole numbers. The grid is a power of two, so that scaling is exact."""
    grid = noise_grid(standard_deviation)
    return normal.mul_(standard_deviation / grid).add_(values, alpha=1.0 / grid).round_()


def to_grid(noisy: Tensor, standard_deviation: float) -> Tensor:
    """Rounds float64 values that have their noise to `noise_grid`, in place."""
    grid = noise_grid(standard_deviation)
    return noisy.div_(grid).round_().mul_(grid)


def add_gaussian(vector: Tensor, standard_deviation: float, source: NoiseSource) -> NoisyVector:
    """A flat vector `[d]` plus N(0, σ²) on each entry, in blocks: two vectors in memory, whatever d is.

    The result has the vector's dtype. Raises `PrivacyError` for a standard deviation that is not above 0.
    """
    if not (math.isfinite(standard_deviation) and standard_deviation > 0.0):
        raise PrivacyError(
            f"the noise's standard deviation is {standard_deviation}: it must be finite and above 0"
        )
    out = torch.empty_like(vector)
    for start in range(0, vector.numel(), _BLOCK):
        block = vector[start : start + _BLOCK].to(torch.float64)
        out[start : start + _BLOCK] = gaussian_block(block, standard_deviation, source)
    return NoisyVector(out, standard_deviation, source.guarantee)


def local_gaussian(
    update: Tensor, clip_norm: float, noise_multiplier: float, source: NoiseSource
) -> NoisyVector:
    """What a silo sends under local privacy: its update clipped to C, plus noise of σ = noise_multiplier · C.

    Any two updates within the bound are 2C apart, so the charge for it is `Charge.local_gaussian`.
    """
    clipped = clip(update, clip_norm)
    return add_gaussian(clipped.vector, noise_multiplier * clip_norm, source)
