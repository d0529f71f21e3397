"""From float vectors to ring elements and back, with overflow impossible by construction.

An update is clipped to the L2 norm C, multiplied by its integer weight w <= W, scaled and rounded
stochastically to an integer of at most wL, where L = ⌊(2^b − 1) / (2 n W)⌋. The sum of n such integers
lies within ± n W L < 2^(b−1), so it is read back from the ring of 2^b elements without ambiguity,
whoever takes part and however extreme the updates are.

The decoded mean is (sum of integers) · C / (L · sum of weights). Each silo's rounding error is less
than one integer, is unbiased, and has a variance of at most 1/4, so with m survivors of total weight
V >= m every coordinate of the mean is off by less than m C / (L V) <= C / L, and by
C √m / (2 L V) in root mean square.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from roundtable.core.errors import InvalidUpdate, PrivacyError
from roundtable.privacy.secagg.masks import Ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters

LEAST_LEVELS = 127
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Quantiser:
    """The arithmetic that all silos of an attempt share.

    `capacity` silos of weight up to `weight_bound` and of L2 norm up to `clip_norm`, in a ring of
    `ring_bits`. PrivacyError where that leaves fewer than 127 levels on either side of zero.
    """

    ring_bits: int
    capacity: int
    weight_bound: int
    clip_norm: float

    def __post_init__(self) -> None:
        ring_dtype(self.ring_bits)
        if self.levels < LEAST_LEVELS:
            raise PrivacyError(
                f"{self.capacity} silos with weights up to {self.weight_bound} leave {self.levels} levels in "
                f"a ring of 2^{self.ring_bits}; use a larger ring or smaller weights"
            )

    @classmethod
    def of(cls, parameters: SecAggParameters) -> Quantiser:
        return cls(parameters.ring_bits, parameters.capacity, parameters.weight_bound, parameters.clip_norm)

    @property
    def levels(self) -> int:
        """L: the integer that a coordinate at the clip norm becomes at weight 1."""
        return ((1 << self.ring_bits) - 1) // (2 * self.capacity * self.weight_bound)

    @property
    def step(self) -> float:
        """C / L: the distance of neighbouring values, and the bound on the error of a decoded mean."""
        return self.clip_norm / self.levels

    def norm_bound(self, length: int) -> float:
        """The largest L2 norm that a silo's update of `length` coordinates has after rounding.

        Rounding moves every coordinate by less than a step, so C + √d · C / L: the sensitivity to use
        when differential privacy is accounted for on the decoded sum.
        """
        return self.clip_norm + math.sqrt(length) * self.step

    def decode_sum(self, total: Ring) -> npt.NDArray[np.float64]:
        """The sum of weighted updates, shape (length,), that a sum of ring elements stands for."""
        shift = 64 - self.ring_bits
        signed = (total.astype(np.uint64) << np.uint64(shift)).view(np.int64) >> np.int64(shift)
        decoded: npt.NDArray[np.float64] = np.multiply(signed, self.step, dtype=np.float64)
        return decoded

    def decode_mean(self, total: Ring, weight: int) -> npt.NDArray[np.float32]:
        """The weighted mean, shape (length,), in blocks; `weight` is the decoded sum of weights."""
        if weight < 1:
            raise InvalidUpdate("examples", f"a total weight of {weight} cannot be divided by")
        mean = np.empty(len(total), dtype=np.float32)
        for start in range(0, len(total), _BLOCK):
            mean[start : start + _BLOCK] = self.decode_sum(total[start : start + _BLOCK]) / weight
        return mean


class QuantisedUpdate:
    """A silo's clipped, weighted and rounded update, and its tail, as a `VectorSource`.

    `update`: float32 or float64, shape (d,), or a memory map; `tail`: ring elements appended as they
    are (see `tally.py`). The norm is taken in one pass before the first block. Rounding draws from a
    cipher keyed by the operating system; `rounding` replaces it in simulation and nowhere else.
    InvalidUpdate (`non_finite`) where the update is not finite.
    """

    def __init__(
        self,
        update: npt.NDArray[np.floating],
        weight: int,
        quantiser: Quantiser,
        tail: Ring | None = None,
        rounding: np.random.Generator | None = None,
    ) -> None:
        if not 1 <= weight <= quantiser.weight_bound:
            raise PrivacyError(f"a weight of {weight} is not between 1 and {quantiser.weight_bound}")
        self._update = update
        self._quantiser = quantiser
        self._weight = weight
        self._tail = np.zeros(0, dtype=ring_dtype(quantiser.ring_bits)) if tail is None else tail
        norm = _norm(update)
        self.clipped = norm > quantiser.clip_norm
        shrink = quantiser.clip_norm / norm if self.clipped else 1.0
        self._scale = shrink * weight * quantiser.levels / quantiser.clip_norm
        self._random = _system_random() if rounding is None else _seeded_random(rounding)

    def __len__(self) -> int:
        return len(self._update) + len(self._tail)

    def block(self, start: int, stop: int) -> Ring:
        """Ring elements from `start` to `stop`, a fresh array, rounded anew at each call."""
        dtype = ring_dtype(self._quantiser.ring_bits)
        cut = len(self._update)
        ring = np.empty(stop - start, dtype=dtype)
        middle = min(max(cut - start, 0), len(ring))
        if middle:
            ring[:middle] = self._round(self._update[start : start + middle]).astype(dtype)
        if middle < len(ring):
            ring[middle:] = self._tail[start + middle - cut : stop - cut]
        return ring

    def _round(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
        bound = self._weight * self._quantiser.levels
        scaled = np.multiply(values, self._scale, dtype=np.float64)
        scaled += self._random(len(values)) * 2.0**-32
        # Floating-point noise may lift a value at the bound above it: the bound is what excludes overflow.
        np.clip(np.floor(scaled, out=scaled), -bound, bound, out=scaled)
        rounded: npt.NDArray[np.int64] = scaled.astype(np.int64)
        return rounded


def _norm(update: npt.NDArray[np.floating]) -> float:
    total = 0.0
    for start in range(0, len(update), _BLOCK):
        # Not a dot product: the threads of a BLAS cost more than they save on blocks of this size.
        total += float(np.square(update[start : start + _BLOCK], dtype=np.float64).sum())
    if not np.isfinite(total):
        raise InvalidUpdate("non_finite", "the update has values that are not finite; nothing was masked")
    return float(np.sqrt(total))


class _system_random:
    """Uniform 32-bit words from AES-256-CTR under a fresh key of the operating system."""

    def __init__(self) -> None:
        self._stream = Cipher(AES(os.urandom(32)), CTR(bytes(16))).encryptor()

    def __call__(self, count: int) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._stream.update(bytes(4 * count)), dtype="<u4")


class _seeded_random:
    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def __call__(self, count: int) -> npt.NDArray[np.uint32]:
        return self._generator.integers(0, 1 << 32, count, dtype=np.uint32)
