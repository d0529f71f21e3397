"""DP-FTRL: noise correlated over rounds, for when the sampling of silos cannot be trusted.

The mechanism adds noise to C x, where row t of C says how much each round's sum x_s counts in round t,
and publishes what follows from it (Kairouz et al. 2021; Choquette-Choo et al. 2023). Published per
round is x_t + w_t, where C w is independent Gaussian noise: later noise takes back part of the
earlier, so that prefix sums, which a model is, are less noisy than with fresh noise every round.

Its sensitivity follows from how often, and how many rounds apart, one silo takes part: that must be
enforced by whoever selects (`eligible`), and is not a matter of chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.mechanisms.central_noise import CentralDP
from roundtable.privacy.mechanisms.gaussian import standard_normal
from roundtable.privacy.mechanisms.noise import NoiseSource

_BLOCK = 1 << 18


@dataclass(frozen=True)
class BandedFTRL:
    """Correlated noise by the banded square root of the prefix-sum matrix.

    C is lower-triangular Toeplitz with the first `bands` coefficients of (1 − x)^(−½) (Fichtenberger et al.
    2023; banded as in Choquette-Choo et al. 2023). `separation` is the least number of rounds from one
    participation of a silo to its next, `rounds` the length of the whole run, which is fixed in advance.
    """

    clip_norm: float
    noise_multiplier: float
    rounds: int
    separation: int
    bands: int

    def __post_init__(self) -> None:
        if not (self.clip_norm > 0.0 and self.noise_multiplier > 0.0):
            raise PrivacyError("correlated noise needs clip_norm and noise_multiplier above 0")
        if not (self.rounds >= 1 and self.separation >= 1 and self.bands >= 1):
            raise PrivacyError("correlated noise needs rounds, separation and bands of at least 1")

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """The first column of C: c_0 = 1, c_j = c_{j−1} (2j − 1) / 2j, zero from `bands` on."""
        return square_root_coefficients(min(self.bands, self.rounds))

    @property
    def standard_deviation(self) -> float:
        """σ of the independent noise beneath w: noise_multiplier · C · sensitivity of the whole run."""
        return self.noise_multiplier * self.clip_norm * self.sensitivity(self.rounds)

    def sensitivity(self, rounds: int) -> float:
        """The most that a silo with contributions of norm 1 changes C x within the first `rounds` rounds."""
        return toeplitz_sensitivity(tuple(self.coefficients), rounds, self.separation)

    def charge(self, round: int) -> Charge:
        """What publishing round `round` (from 1) adds; all rounds together are one Gaussian release.

        After t rounds a silo has moved C x by at most sensitivity(t), so the growth of its square is this
        round's share; a round in which it does not grow costs nothing (`steps` 0).
        """
        if not 1 <= round <= self.rounds:
            raise PrivacyError(f"round {round} of a run planned for {self.rounds}: plan a new run")
        before = self.sensitivity(round - 1) if round > 1 else 0.0
        growth = (self.sensitivity(round) ** 2 - before**2) / self.sensitivity(self.rounds) ** 2
        if growth <= 0.0:
            return Charge("gaussian", "client", "none", (("update", self.noise_multiplier),), steps=0)
        return Charge("gaussian", "client", "none", (("update", self.noise_multiplier / math.sqrt(growth)),))

    def central(self, expected_cohort: float) -> CentralDP:
        """The bounded mean that takes a draw: `prepare(..., correlated=draw)`. Charged by `charge` above."""
        return CentralDP(self.clip_norm, self.standard_deviation / self.clip_norm, expected_cohort)

    def init(self, dimension: int) -> CorrelatedNoise:
        """The noise before round 1."""
        return CorrelatedNoise(self, torch.zeros(len(self.coefficients) - 1, dimension), 0)


@dataclass(frozen=True)
class CorrelatedNoise:
    """What the next rounds' noise depends on: the last bands − 1 published noises, `[bands − 1, d]` float32.

    It is as secret as the updates, and must be stored in the transaction that publishes a round: noise
    that is lost or drawn anew for a published round breaks the guarantee of the whole run.
    """

    plan: BandedFTRL
    history: Tensor
    done: int

    def draw(self, source: NoiseSource) -> Tensor:
        """w_t = z_t − Σ_j c_j w_{t−j} for the next round, float32 `[d]`; fresh at every call.

        An attempt that published nothing may be drawn again; `after` makes a draw count.
        """
        if self.done >= self.plan.rounds:
            raise PrivacyError(
                f"all {self.plan.rounds} rounds of this run have had their noise; plan a new run"
            )
        coefficients = torch.tensor(self.plan.coefficients[1:])
        std = self.plan.standard_deviation
        out = torch.empty(self.history.shape[1])
        used = min(self.done, len(coefficients))
        slots = [(self.done - j) % len(coefficients) for j in range(1, used + 1)] if used else []
        for start in range(0, out.numel(), _BLOCK):
            block = standard_normal(source, min(_BLOCK, out.numel() - start)).mul_(std)
            for coefficient, slot in zip(coefficients.tolist(), slots, strict=False):
                block.sub_(self.history[slot, start : start + _BLOCK], alpha=coefficient)
            out[start : start + _BLOCK] = block
        return out

    def after(self, noise: Tensor) -> CorrelatedNoise:
        """The state once a round was published with this draw. The old state shares the history: drop it."""
        if len(self.history):
            self.history[self.done % len(self.history)] = noise
        return replace(self, done=self.done + 1)


def square_root_coefficients(count: int) -> NDArray[np.float64]:
    """The first coefficients of (1 − x)^(−½): C C is then the matrix of prefix sums."""
    j = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2.0 * j - 1.0) / (2.0 * j))])


@lru_cache(maxsize=4096)
def toeplitz_sensitivity(coefficients: tuple[float, ...], rounds: int, separation: int) -> float:
    """‖Σ_i C[:, i·b]‖ over the most participations that `rounds` allow, b = `separation`.

    The largest sensitivity there is for non-negative, non-increasing coefficients (Kalinin & Lampert 2024,
    Theorem 2); with no more bands than b it is √k ‖c‖ up to the last column. 0 for no rounds.
    """
    total = np.zeros(rounds)
    column = np.asarray(coefficients)
    for start in range(0, rounds, separation):
        part = column[: rounds - start]
        total[start : start + len(part)] += part
    return float(np.linalg.norm(total))


def prefix_error(plan: BandedFTRL, upto: int | None = None) -> float:
    """The noise on one coordinate of the sum of `upto` rounds; without it, the root mean square over all."""
    squares = np.cumsum(np.cumsum(_inverse(plan.coefficients, plan.rounds)) ** 2)
    return plan.standard_deviation * math.sqrt(float(squares.mean() if upto is None else squares[upto - 1]))


def best_bands(clip_norm: float, noise_multiplier: float, rounds: int, separation: int) -> BandedFTRL:
    """The number of bands up to `separation` (memory grows with it) with the least error of prefix sums."""
    choices = sorted(
        {min(separation, rounds, max(1, round(separation * 2.0 ** (-i / 2)))) for i in range(20)}
    )
    plans = [BandedFTRL(clip_norm, noise_multiplier, rounds, separation, bands) for bands in choices]
    return min(plans, key=prefix_error)


def eligible(last_round: Mapping[str, int], silo: str, round: int, separation: int) -> bool:
    """Whether a silo may take part in `round`, given the last round in which each took part.

    The sampler of a DP-FTRL job must select nobody else, in any attempt of the round.
    """
    return silo not in last_round or round - last_round[silo] >= separation


def _inverse(coefficients: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """First column of C⁻¹: power series of 1 / Σ c_j x^j."""
    result = np.zeros(count)
    result[0] = 1.0
    for t in range(1, count):
        reach = min(t, len(coefficients) - 1)
        result[t] = -np.dot(coefficients[1 : reach + 1], result[t - reach : t][::-1])
    return result
