"""Lower-triangular Toeplitz matrices as their first columns: how far a silo moves C x, how noisy a model is.

The matrix mechanism (Choquette-Choo et al. 2023) publishes A x + A C⁻¹ z. A is what the server makes of the
rounds' sums x, C says how the independent noise z is spread over rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_COLUMNS, _SHORT = 64, 128


@dataclass(frozen=True)
class Workload:
    """What each round's model adds up: Σ_t r_t m_t with m_t = x_t + momentum · m_{t−1}, r_t = `rates[t]`."""

    rates: tuple[float, ...]
    momentum: float = 0.0

    @classmethod
    def prefix_sums(cls, rounds: int) -> Workload:
        """Each model is the first one plus the sum of all rounds so far: plain averaging."""
        return cls((1.0,) * rounds)

    @property
    def rounds(self) -> int:
        """How many there are."""
        return len(self.rates)

    @property
    def is_toeplitz(self) -> bool:
        """Whether every round counts alike."""
        return len(set(self.rates)) <= 1

    def mean_square(self, column: Vector) -> float:
        """The noise on one coordinate of a model, squared, averaged over the rounds, for z of variance 1."""
        return self._error(self._response(column), np.arange(self.rounds))[0]

    def square(self, column: Vector, upto: int) -> float:
        """The same on the model after `upto` rounds alone."""
        response, rates = self._response(column), np.asarray(self.rates)
        if self.is_toeplitz:
            return float(((np.cumsum(response)[:upto] * rates[0]) ** 2).sum())
        parts = [rates[start:upto] @ response[: upto - start] for start in range(upto)]
        return float(np.square(parts).sum())

    def with_slope(self, column: Vector) -> tuple[float, Vector]:
        """`mean_square` and its gradient by `column` [rounds].

        Where rates differ, rows of A C⁻¹ are no shifts of one another: 64 of its columns stand for all.
        """
        from scipy.signal import fftconvolve

        response = self._response(column)
        starts = np.unique(np.linspace(0, self.rounds - 1, _COLUMNS).astype(int))
        value, slope = self._error(response, starts)
        through = fftconvolve(response, inverse(column, self.rounds))[: self.rounds]
        return value, -fftconvolve(slope, through[::-1])[self.rounds - 1 :]

    def _response(self, column: Vector) -> Vector:
        """First column of M C⁻¹, where M is the momentum: power series of 1 / ((1 − momentum x) c(x))."""
        return inverse(np.convolve(column, [1.0, -self.momentum]), self.rounds)

    def _error(self, response: Vector, starts: NDArray[np.int_]) -> tuple[float, Vector]:
        rounds = self.rounds
        if self.is_toeplitz:
            rate = self.rates[0]
            sums, share = np.cumsum(response) * rate, np.arange(rounds, 0, -1.0) / rounds
            slope = np.cumsum((2.0 * share * sums)[::-1])[::-1] * rate
            return float(share @ sums**2), slope
        padded = np.concatenate([self.rates, np.zeros(rounds)])
        value, slope = 0.0, np.zeros(rounds)
        for start in starts:
            rates = padded[start : start + rounds]
            sums = np.cumsum(rates * response)
            sums[rounds - start :] = 0.0
            value += float(sums @ sums)
            slope += 2.0 * rates * np.cumsum(sums[::-1])[::-1]
        return value / len(starts), slope / len(starts)


def inverse(column: Vector, count: int) -> Vector:
    """The first `count` coefficients of 1 / Σ c_j x^j: the first column of C⁻¹, where c_0 = 1.

    Long columns are inverted by Newton's iteration g ← g (2 − c g), which doubles the right coefficients.
    """
    from scipy.signal import fftconvolve, lfilter

    column = column[:count]
    if len(column) <= _SHORT:
        impulse = np.zeros(count)
        impulse[0] = 1.0
        return np.asarray(lfilter([1.0], column, impulse), dtype=np.float64)
    result = inverse(column[:_SHORT], _SHORT)
    while len(result) < count:
        size = min(2 * len(result), count)
        product = fftconvolve(column[:size], result)[:size]
        product = np.concatenate([product, np.zeros(size - len(product))])
        correction = fftconvolve(result, -product)[:size]
        correction = np.concatenate([correction, np.zeros(size - len(correction))])
        correction[: len(result)] += 2.0 * result
        result = correction
    return result


def squared_reach(column: Vector, rounds: int, separation: int) -> Vector:
    """How far a silo with contributions of norm 1 moves C x within the first 1, 2, … rounds, squared.

    It takes part in rounds 0, b, 2b, …, b = `separation`. No other pattern with that separation reaches
    further if `is_monotone` (Kalinin & Lampert 2024, Theorem 2); with no more bands than b the columns do
    not overlap, and each participation adds ‖c‖².
    """
    return np.cumsum(participations(column, rounds, separation) ** 2)


def participations(column: Vector, rounds: int, separation: int) -> Vector:
    """Σ_i C[:, i·b] over all that `rounds` allow, b = `separation`."""
    total = np.zeros(rounds)
    for start in range(0, rounds, separation):
        part = column[: rounds - start]
        total[start : start + len(part)] += part
    return total


def is_monotone(column: Vector) -> bool:
    """Whether the coefficients are non-negative and non-increasing, as `squared_reach` needs them."""
    return bool((column >= 0.0).all() and (np.diff(column) <= 0.0).all())


def square_root(count: int, momentum: float = 0.0) -> Vector:
    """The first coefficients of (1 − x)^(−½) (1 − momentum x)^(−½), whose square are the workload's.

    Fichtenberger et al. 2023 without momentum; with it Kalinin & Lampert 2024, Theorem 1.
    """
    j = np.arange(1, count)
    root = np.concatenate([[1.0], np.cumprod((2.0 * j - 1.0) / (2.0 * j))])
    decayed = root * momentum ** np.arange(count)
    return np.convolve(root, decayed)[:count]


def rms(column: Vector, workload: Workload, separation: int) -> float:
    """Root mean square noise of the models for a noise multiplier and a clip norm of 1."""
    reach = squared_reach(column, workload.rounds, separation)[-1]
    return math.sqrt(float(reach) * workload.mean_square(column))
