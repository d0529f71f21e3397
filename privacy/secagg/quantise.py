"""From float vectors to ring elements and back, with overflow impossible by construction.

An update x is clipped to the L2 norm C and weighted by an integer w <= W. A coordinate that is A, the largest
that counts, becomes the integer T at weight W: x_i to w/W · T/A · x_i, rounded stochastically and held within
± T, where T = ⌊(2^b − 1) / (2n)⌋.

*No overflow.* Each of at most n silos submits integers of at most T in absolute value, so that a sum of
them lies within ± nT <= (2^b − 1)/2 < 2^(b−1): it is read back from the ring of 2^b elements without
ambiguity, whoever takes part, whatever the updates are and however rounding falls.

*Error.* One integer is worth u = A W / T, and the decoded mean is u · (sum of integers) / (sum of weights).
Each silo's rounding error is less than one integer, is unbiased, and has a variance of at most 1/4, so with
m survivors of total weight V every coordinate of the mean is off by less than m u / V, and by u √m / (2V)
in root mean square.

A is C where vectors are rounded as they are. Where they have been rotated (`spread`), no coordinate is near
C: those of a vector of d are normally distributed with a deviation of C/√d, and A = 5C/√d. That is √d/5
times as fine, which is what makes rings of 8 to 16 bits serve. One in 1.7 million coordinates of a vector
at the norm C is beyond A and is held at it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from roundtable.core.errors import InvalidUpdate, PrivacyError
from roundtable.privacy.secagg.masks import Ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters

DEVIATIONS = 5.0
"""The largest rotated coordinate that counts, in standard deviations of one of a vector at the clip norm."""
CLIPPED = 1.0 - 2.0**-16
"""Who clips sends a norm of C to within rounding: it counts as clipped from this share of C on."""
_BLOCK = 1 << 16

Rotate = Callable[[npt.NDArray[np.float32]], None]


@dataclass(frozen=True)
class Quantiser:
    """The arithmetic that all silos of an attempt share.

    `capacity` silos of weight up to `weight_bound` and of L2 norm up to `clip_norm`, in a ring of
    `ring_bits`. `spread` is the length of vectors that have been rotated, 0 for those that have not.
    PrivacyError where the ring has no room for a single level on either side of zero.
    """

    ring_bits: int
    capacity: int
    weight_bound: int
    clip_norm: float
    spread: int = 0

    def __post_init__(self) -> None:
        ring_dtype(self.ring_bits)
        if self.top < 1:
            raise PrivacyError(
                f"a ring of 2^{self.ring_bits} has no room for a sum of {self.capacity} silos: it holds that "
                f"of {((1 << self.ring_bits) - 1) // 2} at most. Use a larger ring or a smaller cohort"
            )

    @classmethod
    def of(cls, parameters: SecAggParameters, spread: int = 0) -> Quantiser:
        agreed = (parameters.ring_bits, parameters.capacity, parameters.weight_bound, parameters.clip_norm)
        return cls(*agreed, spread)

    @property
    def top(self) -> int:
        """T: the largest integer that a silo submits, in absolute value."""
        return ((1 << self.ring_bits) - 1) // (2 * self.capacity)

    @property
    def largest(self) -> float:
        """A: the largest coordinate that counts."""
        usual = DEVIATIONS * self.clip_norm / math.sqrt(self.spread) if self.spread else self.clip_norm
        return min(self.clip_norm, usual)

    @property
    def unit(self) -> float:
        """u = A W / T: what one integer is worth in the weighted sum."""
        return self.largest * self.weight_bound / self.top

    def norm_bound(self, length: int) -> float:
        """The largest L2 norm that an update of `length` coordinates has after rounding, at the largest
        weight.

        Rounding moves every coordinate by less than A / T, so C + √d · A / T: the sensitivity to use
        when differential privacy is accounted for on the decoded sum.
        """
        return self.clip_norm + math.sqrt(length) * self.largest / self.top

    def expected_error(self, length: int, silos: int) -> float:
        """The L2 norm of the error of a mean over `silos` equal weights of the bound, at most, in root mean
        square: √d · A / (2T√m)."""
        return math.sqrt(length / silos) * self.largest / (2 * self.top)

    def decode_sum(self, total: Ring) -> npt.NDArray[np.float64]:
        """The sum of weighted updates, shape (length,), that a sum of ring elements stands for."""
        decoded: npt.NDArray[np.float64] = np.multiply(self.signed(total), self.unit, dtype=np.float64)
        return decoded

    def signed(self, total: Ring) -> npt.NDArray[np.int64]:
        """The integers, between ± 2^(b−1), that ring elements stand for."""
        shift = 64 - self.ring_bits
        raised: npt.NDArray[np.uint64] = total.astype(np.uint64) << np.uint64(shift)
        signed: npt.NDArray[np.int64] = raised.view(np.int64) >> np.int64(shift)
        return signed

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

    `update`: float32 or float64, shape (d,), or a memory map; `tail`: ring elements appended as they are
    (see `sum_tail.py`). The norm is taken in one pass before the first block. `rotate` turns a clipped copy
    in place, for quantisers of rotated vectors. Rounding draws from a cipher keyed by the operating system;
    `rounding` replaces it in simulation and nowhere else. InvalidUpdate (`non_finite`) where the update is
    not finite.
    """

    def __init__(
        self,
        update: npt.NDArray[np.floating],
        weight: int,
        quantiser: Quantiser,
        tail: Ring | None = None,
        rounding: np.random.Generator | None = None,
        rotate: Rotate | None = None,
    ) -> None:
        if (rotate is None) != (quantiser.spread == 0):
            raise PrivacyError("vectors are rotated if and only if the quantiser is one of rotated vectors")
        if not 1 <= weight <= quantiser.weight_bound:
            raise PrivacyError(f"a weight of {weight} is not between 1 and {quantiser.weight_bound}")
        self._update = update
        self._quantiser = quantiser
        self._weight = weight
        self._tail = np.zeros(0, dtype=ring_dtype(quantiser.ring_bits)) if tail is None else tail
        norm = _norm(update)
        self.clipped = norm > quantiser.clip_norm * CLIPPED
        shrink = quantiser.clip_norm / norm if norm > quantiser.clip_norm else 1.0
        if rotate is not None:
            # Clipped before it is turned: the sums of a long vector could be too large for float32.
            self._update = np.multiply(update, shrink, dtype=np.float32)
            rotate(self._update)
            shrink = 1.0
        self._scale = shrink * weight / quantiser.unit
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
        bound = self._quantiser.top
        scaled = np.multiply(values, self._scale, dtype=np.float64)
        scaled += self._random(len(values)) * 2.0**-32
        # Rounding may lift a value at the bound above it: the bound is what excludes overflow.
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
