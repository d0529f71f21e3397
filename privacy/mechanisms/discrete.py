"""Noise on the integers: the discrete Gaussian (Canonne, Kamath & Steinke 2020) and Skellam noise.

Both are drawn by inversion of a cumulative table whose entries are computed with big integers and
kept to 128 bits, compared with 64 random bits and, on a tie, 64 more. No floating-point number takes
part, and what a draw can differ from its distribution is below 2^-100 in total variation, so a vector
of a billion entries adds less than 2^-70 to δ.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from roundtable.core.errors import PrivacyError
from roundtable.privacy.mechanisms.noise import NoiseSource

# Fourteen standard deviations: what lies beyond has probability e^-98 or less.
_WIDTH = 14
_LARGEST_STD = 1 << 17
_BLOCK = 1 << 16
_GUIDE_BITS = 16
_LOW_64 = (1 << 64) - 1


class TableSampler:
    """Draws integers −K to K whose cumulative probabilities are given as integers over 2^128."""

    def __init__(self, cumulative: list[int], offset: int) -> None:
        self._high = np.array([value >> 64 for value in cumulative], dtype=np.uint64)
        self._low = np.array([value & _LOW_64 for value in cumulative], dtype=np.uint64)
        self._offset = offset
        edges = np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(64 - _GUIDE_BITS)
        self._guide = np.searchsorted(self._high, edges, side="left").astype(np.int32)

    def draw(self, source: NoiseSource, count: int) -> NDArray[np.int32]:
        """`count` independent draws."""
        out = np.empty(count, dtype=np.int32)
        for start in range(0, count, _BLOCK):
            words = source.words(min(_BLOCK, count - start))
            out[start : start + len(words)] = self._invert(words, source)
        return out

    def _invert(self, words: NDArray[np.uint64], source: NoiseSource) -> NDArray[np.int32]:
        """How many thresholds lie at or below each word. Most buckets of the guide hold at most two."""
        index = self._guide[words >> np.uint64(64 - _GUIDE_BITS)]
        for _ in range(2):
            index += self._high[index] < words
        behind = np.flatnonzero(self._high[index] < words)
        index[behind] = np.searchsorted(self._high, words[behind], side="left")
        for tie in np.flatnonzero(self._high[index] == words):
            extra = source.words(1)[0]
            while self._high[index[tie]] == words[tie] and self._low[index[tie]] <= extra:
                index[tie] += 1
        draws: NDArray[np.int32] = index - np.int32(self._offset)
        return draws


def discrete_gaussian(variance: Fraction) -> TableSampler:
    """P(k) ∝ exp(−k² / 2σ²) for σ² = `variance`. Raises `PrivacyError` for a variance out of range."""
    return _gaussian_table(_checked(variance))


def skellam(variance: Fraction) -> TableSampler:
    """The difference of two Poisson draws of mean `variance` / 2: P(k) = e^−μ I_|k|(μ), μ = `variance`."""
    return _skellam_table(_checked(variance))


def _checked(variance: Fraction) -> Fraction:
    if not Fraction(1, 1 << 20) <= variance <= _LARGEST_STD**2:
        raise PrivacyError(
            f"discrete noise of variance {float(variance):g} is out of range: it must lie between 2^-20 and "
            f"2^{2 * _LARGEST_STD.bit_length() - 2}; change the number of bits"
        )
    return variance


def _reach(variance: Fraction) -> int:
    """Beyond it lies less than 2^-100: by Gaussian tails, and for tiny variances by 64 more terms."""
    return _WIDTH * (math.isqrt(math.ceil(variance)) + 1) + 64


@lru_cache(maxsize=8)
def _gaussian_table(variance: Fraction) -> TableSampler:
    bits = 400
    with localcontext() as context:
        context.prec = 140
        inverse = Decimal(variance.denominator) / Decimal(variance.numerator)
        step = int((-inverse).exp() * (1 << bits))
        ratio = int((-inverse / 2).exp() * (1 << bits))
    weights = [1 << bits]
    for _ in range(_reach(variance)):
        weights.append(weights[-1] * ratio >> bits)
        ratio = ratio * step >> bits
    return _symmetric(weights)


@lru_cache(maxsize=8)
def _skellam_table(variance: Fraction) -> TableSampler:
    """Miller's backward recurrence I_{k−1} = I_{k+1} + (2k/μ) I_k, which is stable in this direction."""
    reach = _reach(variance)
    numerator, denominator = variance.numerator, variance.denominator
    weights = [0] * (reach + 1)
    above, here = 0, 1 << 256
    for k in range(reach, -1, -1):
        weights[k] = here
        above, here = here, above + 2 * k * denominator * here // numerator
    return _symmetric(weights)


def _symmetric(weights: list[int]) -> TableSampler:
    """The table for −K … K from the weights of 0 … K; the last threshold, the whole, is left out."""
    total = 2 * sum(weights) - weights[0]
    cumulative, running = [], 0
    for weight in [*reversed(weights[1:]), *weights[:-1]]:
        running += weight
        cumulative.append((running << 128) // total)
    return TableSampler(
        [min(value, (1 << 128) - 1) for value in cumulative] + [(1 << 128) - 1], len(weights) - 1
    )
