"""Noise in shares: each silo encodes its update with discrete noise, and only the sum mod 2^b is private.

Kairouz, Liu & Steinke 2021 (discrete Gaussian) and Agarwal, Kairouz & Liu 2021 (Skellam): clip,
rotate, scale, round at random to integers whose norm is checked, add a share of the noise, reduce
modulo 2^b. A secure aggregation carries `encode`'s integers; `decode` takes their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import DistributedLevel
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.mechanisms.clipping import clip
from roundtable.privacy.mechanisms.discrete import TableSampler, discrete_gaussian, skellam
from roundtable.privacy.mechanisms.noise import NoiseSource
from roundtable.privacy.mechanisms.rotation import padded_length, rotate, unrotate
from roundtable.privacy.secagg.groups import largest_group
from roundtable.privacy.secagg.parameters import MINIMUM_COHORT

# A rotated entry of the sum beyond six standard deviations wraps around: two in a billion do.
_DEVIATIONS = 6.0
# Rounding to this part of the clip norm over √d lengthens a vector by 0.13 % and keeps tables small.
_FINEST_ROUNDING = 0.1
_LARGEST_SHARE = 1 << 15
_VARIANCE_STEPS = 1 << 10
# √(2 ln 1/β) for β = e^-½: a rounding is tried again with probability at most β (Kairouz et al., 4.2).
_ROOT_OF_BETA = 1.0
_TRIES = 64


@dataclass(frozen=True)
class DistributedDP:
    """The parameters that every silo of a round shares.

    `dimension` is the update's length, `cohort` the most silos that can be in the sum and `survivors` the
    fewest. `colluding` of them may be the coordinator's: they add no noise, or say which, and what remains
    of the sum for the coordinator is that of the honest ones. Each silo adds a share of σ²/`honest`, so that
    any so many honest shares make up the claimed σ², and more only add to it. `noise_multiplier` is σ over
    the norm of a rounded vector.
    """

    clip_norm: float
    noise_multiplier: float
    dimension: int
    cohort: int
    survivors: int
    colluding: int = 0
    bits: int = 24
    mechanism: str = "skellam"

    def __post_init__(self) -> None:
        if not (self.clip_norm > 0.0 and self.noise_multiplier > 0.0 and self.dimension > 0):
            raise PrivacyError("distributed noise needs clip_norm, noise_multiplier and dimension above 0")
        if not 0 <= self.colluding < self.survivors <= self.cohort:
            raise PrivacyError(
                f"of a cohort of {self.cohort} silos {self.survivors} may be all that are in a sum, and "
                f"{self.colluding} may collude: nobody honest is sure to be left whose noise hides a silo. "
                "Lower privacy.dropout_tolerance or privacy.corruption"
            )
        if not 8 <= self.bits <= 32:
            raise PrivacyError(f"{self.bits} bits: choose 8 to 32, 20 to 24 as a rule")
        inflation = self.norm_bound * self.granularity / self.clip_norm
        if not inflation < 2.0:
            raise PrivacyError(
                f"{self.bits} bits are too few for a sum of {self.cohort} silos: rounding would more than "
                "double "
                "the noise; use 20 to 24"
            )

    @classmethod
    def of_job(
        cls, privacy: DistributedLevel, noise_multiplier: float, dimension: int, cohort: int, colluding: int
    ) -> DistributedDP:
        """The parameters of a job whose sums lose its `dropout_tolerance` and hold `colluding` silos.

        With groups each group's sum is published, and has noise of its own: enough in the smallest
        group that can be drawn, and room for the largest.
        """
        smallest = cohort
        if privacy.group_size is not None:
            smallest, cohort = privacy.group_size, largest_group(privacy.group_size, cohort)
        staying = math.floor((1.0 - privacy.dropout_tolerance) * smallest + 1e-9)
        survivors = min(smallest, max(MINIMUM_COHORT, staying))
        numbers = (dimension, cohort, survivors, colluding)
        return cls(privacy.clip_norm, noise_multiplier, *numbers, privacy.bits, privacy.mechanism)

    @property
    def honest(self) -> int:
        """The fewest silos whose noise a sum is sure to hold for somebody who knows that of the others."""
        return self.survivors - self.colluding

    @property
    def length(self) -> int:
        """The length of an encoded vector: the next power of two."""
        return padded_length(self.dimension)

    @cached_property
    def granularity(self) -> float:
        """γ: the value of one integer step, the least for which the noisy sum fits into 2^b."""
        spread = self.cohort * self.clip_norm / math.sqrt(self.length)
        finest = _FINEST_ROUNDING * self.clip_norm / math.sqrt(self.length)
        gamma = finest
        for _ in range(100):
            share = self.noise_multiplier * self._bound(gamma) / math.sqrt(self.honest)
            total = math.sqrt(spread**2 + self.cohort * (share**2 + gamma**2 / 4.0))
            gamma = max(finest, 2.0 * _DEVIATIONS * total / 2.0**self.bits, share / _LARGEST_SHARE)
        return gamma

    def _bound(self, gamma: float) -> float:
        """The norm that a rounded vector may have, in the update's units (Kairouz et al., Lemma 29)."""
        root = math.sqrt(self.length)
        certain = self.clip_norm + gamma * root
        likely = self.clip_norm**2 + gamma**2 * self.length / 4.0
        likely += _ROOT_OF_BETA * gamma * (self.clip_norm + gamma * root / 2.0)
        return min(certain, math.sqrt(likely))

    @cached_property
    def norm_bound(self) -> float:
        """Δ₂: the norm that an encoded vector has at most, in integer steps, before its noise."""
        return self._bound(self.granularity) / self.granularity

    @cached_property
    def share_variance(self) -> Fraction:
        """The variance of one silo's noise in integer steps: (z Δ₂)² / honest, rounded up."""
        wanted = (self.noise_multiplier * self.norm_bound) ** 2 / self.honest
        return Fraction(math.ceil(wanted * _VARIANCE_STEPS), _VARIANCE_STEPS)

    @property
    def charge(self) -> Charge:
        """What one sum costs. No amplification: the coordinator knows who takes part."""
        return Charge(
            mechanism=self.mechanism,
            unit="client",
            sampling="none",
            parts=(("update", self.noise_multiplier),),
            grid_std=math.sqrt(self.honest * float(self.share_variance)),
            dimension=self.length,
            shares=self.honest,
        )

    def sampler(self) -> TableSampler:
        """Draws one silo's share."""
        make = skellam if self.mechanism == "skellam" else discrete_gaussian
        return make(self.share_variance)


def encode(update: Tensor, params: DistributedDP, seed: bytes, source: NoiseSource) -> NDArray[np.uint32]:
    """A silo's update, clipped, rotated, rounded and with its share of the noise: `[params.length]` mod 2^b.

    `seed` is public and the same for all silos of a round. The integers have a norm of at most
    `params.norm_bound` before the noise, whatever rounding in floating point did.
    Raises `InvalidUpdate` for an update that is not finite, `PrivacyError` for one of another length.
    """
    if update.numel() != params.dimension:
        raise PrivacyError(f"an update of {update.numel()} entries, where {params.dimension} were agreed")
    rotated = rotate(clip(update.to(torch.float32), params.clip_norm).vector, seed)
    integers = _round(rotated.div_(params.granularity), params.norm_bound, source)
    integers += params.sampler().draw(source, params.length)
    return _reduce(integers, params.bits)


def decode(total: NDArray[np.uint32], params: DistributedDP, seed: bytes, answered: int) -> Tensor:
    """The noisy sum of the updates, float32 `[params.dimension]`, from the sum of their encodings mod 2^b.

    `answered` silos are in the sum. Raises `PrivacyError` where they are fewer than `survivors` (the noise
    would be less than claimed: nothing may be published) or more than the cohort (it may have wrapped).
    """
    if not params.survivors <= answered <= params.cohort:
        raise PrivacyError(
            f"{answered} silos are in the sum; it is private and exact for {params.survivors} to "
            f"{params.cohort} of "
            "them. Fail the attempt, and allow for more dropouts in the next"
        )
    if total.shape != (params.length,):
        raise PrivacyError(f"a sum of {total.size} entries, where {params.length} were agreed")
    shift = 32 - params.bits
    centred = (total.astype(np.uint32) << np.uint32(shift)).view(np.int32) >> shift
    values = torch.from_numpy(centred).to(torch.float32)
    return unrotate(values, seed, params.dimension).mul_(params.granularity)


def _round(values: Tensor, bound: float, source: NoiseSource) -> NDArray[np.int32]:
    """Conditional stochastic rounding: unbiased, tried again until the norm is within `bound`."""
    for attempt in range(_TRIES):
        dither = source.words((values.numel() + 1) // 2).view(np.uint32)[: values.numel()]
        shifted = torch.from_numpy(dither.view(np.int32)).to(torch.float64).mul_(2.0**-32).add_(0.5)
        integers = shifted.add_(values).floor_()
        if float(torch.dot(integers, integers)) <= bound * bound:
            return integers.to(torch.int32).numpy()
        if attempt >= _TRIES // 2:
            values = values * 0.99
    return np.zeros(values.numel(), dtype=np.int32)


def _reduce(integers: NDArray[np.int32], bits: int) -> NDArray[np.uint32]:
    return integers.view(np.uint32) & np.uint32((1 << bits) - 1)
