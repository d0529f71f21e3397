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
from roundtable.privacy.mechanisms.clipping import clip
from roundtable.privacy.mechanisms.gaussian import BLOCK, block_of_normals, sum_on_grid
from roundtable.privacy.mechanisms.noise import NoiseSource

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


def noise_onto(
    values: Tensor, standard_deviation: float, source: NoiseSource, out: Tensor, divisor: float = 1.0
) -> None:
    """Writes `values` plus noise, on `noise_grid`, over `divisor`, into `out`; that may be `values`."""
    for start in range(0, values.numel(), BLOCK):
        part = slice(start, start + BLOCK)
        normal = block_of_normals(source, values[part].numel())
        normals_onto(values[part], standard_deviation, normal, out[part], divisor)


def normals_onto(
    values: Tensor, standard_deviation: float, normal: Tensor, out: Tensor, divisor: float = 1.0
) -> None:
    """The same with standard normal draws at hand (float64; they may be overwritten).

    The grid is a power of two: scaling to its steps is exact, and rounding happens once, to whole steps.
    """
    grid = noise_grid(standard_deviation)
    sum_on_grid(values, normal, out, 1.0 / grid, standard_deviation / grid, grid / divisor)


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
    noise_onto(vector, standard_deviation, source, out)
    return NoisyVector(out, standard_deviation, source.guarantee)


def local_gaussian(
    update: Tensor, clip_norm: float, noise_multiplier: float, source: NoiseSource
) -> NoisyVector:
    """What a silo sends under local privacy: its update clipped to C, plus noise of σ = noise_multiplier · C.

    Any two updates within the bound are 2C apart, so the charge for it is `Charge.local_gaussian`.
    """
    clipped = clip(update, clip_norm)
    return add_gaussian(clipped.vector, noise_multiplier * clip_norm, source)
