"""The factorisations that a job's noise is made by, optimised for its rounds, separation and workload.

`Banded`: C is a lower-triangular Toeplitz matrix of a few bands (BandMF: Choquette-Choo et al. 2023,
"(Amplified) banded matrix factorization"). `Buffered`: its coefficients are a sum of few decaying powers
(BLT: Dvijotham et al. 2024; for many participations McMahan, Xu & Zhang 2024), so that little memory
correlates all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from roundtable.core.errors import PrivacyError
from roundtable.privacy.mechanisms.toeplitz import (
    Vector,
    Workload,
    is_monotone,
    participations,
    rms,
    square_root,
)

_STEPS, _ALIKE = 400, 1.005
BANDS, BUFFERS = 16, 3
"""The most that are tried where a job states none."""
_LEAST_GAP = 1e-6
"""1 − decay of a buffer: closer to 1, its sum in float32 would lose what it adds."""


@dataclass(frozen=True)
class Banded:
    """`coefficients` are c_0 = 1, c_1, …; all further ones are 0."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(np.asarray(self.coefficients))

    @property
    def kept(self) -> int:
        """Vectors that the noise of later rounds depends on."""
        return len(self.coefficients) - 1

    @property
    def bands(self) -> int:
        """Coefficients that are not 0."""
        return len(self.coefficients)

    @property
    def keys(self) -> Mapping[str, tuple[float, ...] | None]:
        """The keys of `[privacy]` that state it."""
        return {"coefficients": self.coefficients, "decays": None}

    def column(self, rounds: int) -> Vector:
        """The first column of C, without the zeros."""
        return np.asarray(self.coefficients[:rounds])

    @override
    def __str__(self) -> str:
        return f"banded, {self.bands} bands"


@dataclass(frozen=True)
class Buffered:
    """c_0 = 1 and c_j = Σ_i `weights[i]` · `decays[i]`^(j − 1)."""

    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.decays) or not self.weights:
            raise PrivacyError(
                f"{len(self.weights)} coefficients and {len(self.decays)} decays: each buffer has one of both"
            )
        if not all(weight > 0.0 for weight in self.weights) or not sum(self.weights) <= 1.0:
            raise PrivacyError(
                f"coefficients = {list(self.weights)}: the weights of buffers are above 0 and add up to at "
                "most 1, or the sensitivity is not known; leave privacy.coefficients and decays out"
            )
        if not all(0.0 <= decay <= 1.0 - _LEAST_GAP for decay in self.decays):
            raise PrivacyError(
                f"decays = {list(self.decays)}: those of buffers are from 0 to {1.0 - _LEAST_GAP:.6f}; leave "
                "privacy.decays and coefficients out"
            )

    @property
    def kept(self) -> int:
        """Vectors that the noise of later rounds depends on."""
        return len(self.weights)

    @property
    def keys(self) -> Mapping[str, tuple[float, ...] | None]:
        """The keys of `[privacy]` that state it."""
        return {"coefficients": self.weights, "decays": self.decays}

    def column(self, rounds: int) -> Vector:
        """The first column of C [rounds]."""
        powers = np.asarray(self.decays)[:, None] ** np.arange(max(rounds - 1, 0))
        return np.concatenate([[1.0], np.asarray(self.weights) @ powers])

    @override
    def __str__(self) -> str:
        return f"BLT, {self.kept} buffer{'s' if self.kept > 1 else ''}"


Factorisation = Banded | Buffered


def optimal_banded(workload: Workload, bands: int, separation: int) -> Banded:
    """The coefficients with the least `toeplitz.rms`, found by gradient descent from the square root.

    They are products of factors in (0, 1), hence non-increasing, so that the sensitivity is exact.
    """
    bands = min(bands, workload.rounds)
    if bands == 1:
        return Banded((1.0,))
    start = square_root(bands, workload.momentum)

    def column(free: Vector) -> tuple[Vector, Callable[[Vector], Vector]]:
        factors = _squash(free)
        c = np.concatenate([[1.0], np.cumprod(factors)])

        def back(slope: Vector) -> Vector:
            ahead = np.cumsum((slope[:bands] * c)[::-1])[::-1]
            return np.asarray((1.0 - factors) * ahead[1:])

        return c, back

    best = _descend(column, _unsquash(start[1:] / start[:-1]), workload, separation)
    return Banded(tuple(map(float, column(best)[0])))


def optimal_buffered(workload: Workload, buffers: int, separation: int) -> Buffered:
    """The buffers with the least `toeplitz.rms`, found by gradient descent from spread-out decays.

    Weights are a softmax with a part left over: their sum, c_1, stays below c_0 = 1.
    """
    rounds, powers = workload.rounds, np.arange(max(workload.rounds - 1, 0))

    def column(free: Vector) -> tuple[Vector, Callable[[Vector], Vector]]:
        weights, decays = _parts(free)
        table = decays[:, None] ** powers
        c = np.concatenate([[1.0], weights @ table])

        def back(slope: Vector) -> Vector:
            by_weight = table @ slope[1:]
            by_decay = weights * ((table[:, :-1] * powers[1:]) @ slope[2:])
            mixed = weights * (by_weight - weights @ by_weight)
            return np.concatenate([mixed, by_decay * decays * (1.0 - decays)])

        return c, back

    spread = (np.arange(buffers) + 0.5) / buffers
    gaps = np.clip(rounds ** (-spread), _LEAST_GAP, 0.5)
    start = np.concatenate([np.full(buffers, -np.log(buffers)), _unsquash(1.0 - gaps)])
    weights, decays = _parts(_descend(column, start, workload, separation))
    return Buffered(tuple(map(float, weights)), tuple(map(float, decays)))


def best_factorisation(
    workload: Workload, separation: int, bands: int | None = None, buffers: int | None = None
) -> Factorisation:
    """The factorisation with so many `bands`, or `buffers`.

    Where neither is stated: of up to `BANDS` bands (no more than `separation`) and up to `BUFFERS` buffers
    the one that keeps the least, among those within 0.5 % of the least noise.
    """
    if bands is not None:
        return optimal_banded(workload, bands, separation)
    if buffers is not None:
        return optimal_buffered(workload, buffers, separation)
    tried: list[Factorisation] = [
        optimal_banded(workload, min(BANDS, separation), separation),
        *(optimal_buffered(workload, count, separation) for count in range(1, BUFFERS + 1)),
    ]
    noise = {each: rms(each.column(workload.rounds), workload, separation) for each in tried}
    enough = [each for each in tried if noise[each] <= _ALIKE * min(noise.values())]
    return min(enough, key=lambda each: each.kept)


def _check(column: Vector) -> None:
    if len(column) == 0 or column[0] != 1.0 or not is_monotone(column):
        begin = ", ".join(f"{value:g}" for value in column[:4]) + (", …" if len(column) > 4 else "")
        raise PrivacyError(
            f"coefficients = [{begin}]: banded noise takes those that begin with 1, never rise and are not "
            "below 0, as for others the largest sensitivity over all ways to take part is not known; leave "
            "privacy.coefficients out and have them optimised"
        )


def _descend(
    column: Callable[[Vector], tuple[Vector, Callable[[Vector], Vector]]],
    start: Vector,
    workload: Workload,
    separation: int,
) -> Vector:
    """Minimises log(reach²) + log(error²) over what `column` takes; returns where it is least."""
    from scipy.optimize import minimize

    def loss(free: Vector) -> tuple[float, Vector]:
        c, back = column(free)
        error, by_error = workload.with_slope(_padded(c, workload.rounds))
        total = participations(c, workload.rounds, separation)
        reach = float(total @ total)
        slope = by_error / error + 2.0 * _overlap(total, separation) / reach
        return float(np.log(error) + np.log(reach)), back(slope)

    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS, "maxcor": 20})
    return np.asarray(found.x)


def _overlap(total: Vector, separation: int) -> Vector:
    """Σ_i total[j + i·b] for every j: how the sum of all participations answers to c_j."""
    slope = np.zeros(len(total))
    for start in range(0, len(total), separation):
        slope[: len(total) - start] += total[start:]
    return slope


def _padded(column: Vector, rounds: int) -> Vector:
    return np.concatenate([column, np.zeros(rounds - len(column))])


def _parts(free: Vector) -> tuple[Vector, Vector]:
    first, second = np.split(free, 2)
    raised = np.exp(np.minimum(first, 30.0))
    return raised / (1.0 + raised.sum()), np.minimum(_squash(second), 1.0 - _LEAST_GAP)


def _squash(free: Vector) -> Vector:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(free, -40.0, 40.0))))


def _unsquash(values: Vector) -> Vector:
    return np.asarray(np.log(values / (1.0 - values)))
