"""DP-FTRL: noise correlated over rounds by a matrix mechanism.

The mechanism adds noise to C x, where row t of C says how much each round's sum x_s counts in round t,
and publishes what follows from it (Kairouz et al. 2021; Choquette-Choo et al. 2023). Published per
round is x_t + w_t, where C w is independent Gaussian noise: later noise takes back part of the
earlier, so that prefix sums, which a model is, are less noisy than with fresh noise every round.

Its sensitivity follows from how often, and how many rounds apart, one silo takes part: that must be
enforced by whoever selects (`eligible`), and is not a matter of chance.

With a sampling rate it is (cyclic Poisson sampling: Choquette-Choo et al. 2023, "(Amplified) banded matrix
factorization", Theorem 4). The silos are divided into b groups once, in round t each silo of group t mod b
takes part by a secret coin of its own, and C has at most b bands. Columns of one silo's rounds then share no
row: its ⌈rounds / b⌉ chances are as many Poisson-sampled Gaussian releases, each of sensitivity ‖c‖. How the
groups came about does not matter, as long as a silo's does not depend on other silos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.mechanisms.central_noise import CentralDP
from roundtable.privacy.mechanisms.factorise import Banded, Factorisation
from roundtable.privacy.mechanisms.gaussian import standard_normal
from roundtable.privacy.mechanisms.noise import NoiseSource
from roundtable.privacy.mechanisms.toeplitz import Vector, Workload, squared_reach

_BLOCK = 1 << 18


@dataclass(frozen=True)
class MatrixMechanism:
    """Correlated noise by a lower-triangular Toeplitz C, over `rounds` fixed in advance.

    `separation` is the least number of rounds from one participation of a silo to its next; with a `rate`
    the number of groups, of each of which every silo is drawn with this probability when it has its turn.
    """

    clip_norm: float
    noise_multiplier: float
    rounds: int
    separation: int
    factorisation: Factorisation
    rate: float | None = None

    def __post_init__(self) -> None:
        if not (self.clip_norm > 0.0 and self.noise_multiplier > 0.0):
            raise PrivacyError("correlated noise needs clip_norm and noise_multiplier above 0")
        if not (self.rounds >= 1 and self.separation >= 1):
            raise PrivacyError("correlated noise needs rounds and separation of at least 1")
        if self.rate is not None and not 0.0 < self.rate <= 1.0:
            raise PrivacyError(f"the sampling rate is {self.rate}: it must be above 0 and at most 1")
        banded = isinstance(self.factorisation, Banded) and self.factorisation.bands <= self.separation
        if self.rate is not None and not banded:
            raise PrivacyError(
                f"{self.factorisation} is not known to be amplified by sampling {self.separation} groups in "
                "turn: take banded noise with no more bands than groups"
            )

    @cached_property
    def column(self) -> Vector:
        """The first column of C, which begins with 1; what is missing of it is 0."""
        return self.factorisation.column(self.rounds)

    @property
    def period(self) -> int:
        """Rounds between the participations that are one release: with a rate, each is one of its own."""
        return self.rounds if self.rate is not None else self.separation

    @cached_property
    def reach(self) -> Vector:
        """Squares of the most that a silo with contributions of norm 1 changes C x in 1, 2, … rounds, by all
        that is one release."""
        return squared_reach(self.column, self.rounds, self.period)

    @property
    def standard_deviation(self) -> float:
        """σ of the independent noise beneath w: noise_multiplier · C · sensitivity of a release."""
        return self.noise_multiplier * self.clip_norm * self.sensitivity(self.rounds)

    def sensitivity(self, rounds: int) -> float:
        """The most that a silo with contributions of norm 1 changes C x within the first `rounds` rounds."""
        return math.sqrt(self.reach[rounds - 1]) if rounds else 0.0

    def charge(self, round: int) -> Charge:
        """What publishing round `round` (from 1) adds.

        Without sampling all rounds together are one Gaussian release. After t rounds a silo has moved C x by
        at most sensitivity(t), so the growth of its square is this round's share; a round in which it
        does not grow costs nothing (`steps` 0). With a rate the first round of each turn through the groups
        is a Poisson-sampled release, and the others cost nothing: no silo has another chance in them.
        """
        if not 1 <= round <= self.rounds:
            raise PrivacyError(f"round {round} of a run planned for {self.rounds}: plan a new run")
        if self.rate is not None:
            steps = int((round - 1) % self.separation == 0)
            parts = (("update", self.noise_multiplier),)
            return Charge(
                "gaussian", "client", "poisson", parts, steps=steps, rate=self.rate, groups=self.separation
            )
        before = self.reach[round - 2] if round > 1 else 0.0
        growth = float(self.reach[round - 1] - before) / float(self.reach[-1])
        if growth <= 0.0:
            return Charge("gaussian", "client", "none", (("update", self.noise_multiplier),), steps=0)
        return Charge("gaussian", "client", "none", (("update", self.noise_multiplier / math.sqrt(growth)),))

    def central(self, expected_cohort: float) -> CentralDP:
        """The bounded mean that takes a draw: `prepare(..., correlated=draw)`. Charged by `charge` above."""
        return CentralDP(self.clip_norm, self.standard_deviation / self.clip_norm, expected_cohort)

    def init(self, dimension: int) -> CorrelatedNoise:
        """The noise before round 1."""
        return CorrelatedNoise(self, torch.zeros(self.factorisation.kept, dimension), 0)


@dataclass(frozen=True)
class CorrelatedNoise:
    """What the next rounds' noise depends on, float32 `[kept, d]`: of banded noise the last published ones,
    of BLT its buffers, s_i ← decay_i · s_i + w.

    It is as secret as the updates, and must be stored in the transaction that publishes a round: noise
    that is lost or drawn anew for a published round breaks the guarantee of the whole run. Its rounding to
    float32 depends on noise alone, and is as far below σ as the grid that models are rounded to.
    """

    plan: MatrixMechanism
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
        std, taken = self.plan.standard_deviation, self._taken_back()
        out = torch.empty(self.history.shape[1])
        for start in range(0, out.numel(), _BLOCK):
            block = standard_normal(source, min(_BLOCK, out.numel() - start)).mul_(std)
            for slot, weight in taken:
                block.sub_(self.history[slot, start : start + _BLOCK], alpha=weight)
            out[start : start + _BLOCK] = block
        return out

    def after(self, noise: Tensor) -> CorrelatedNoise:
        """The state once a round was published with this draw. The old state shares the history: drop it."""
        match self.plan.factorisation:
            case Banded(bands=1):
                pass
            case Banded(kept=kept):
                self.history[self.done % kept] = noise
            case buffered:
                for row, decay in zip(self.history, buffered.decays, strict=True):
                    for start in range(0, noise.numel(), _BLOCK):
                        part = slice(start, start + _BLOCK)
                        # In float64: a decay that is rounded itself would make another C of it.
                        row[part] = row[part].double().mul_(decay).add_(noise[part])
        return replace(self, done=self.done + 1)

    def _taken_back(self) -> list[tuple[int, float]]:
        """Which rows of the history the next noise takes back, and how much of each."""
        match self.plan.factorisation:
            case Banded(coefficients=coefficients, kept=kept):
                used = min(self.done, kept)
                return [((self.done - j) % kept, coefficients[j]) for j in range(1, used + 1)]
            case buffered:
                return list(enumerate(buffered.weights)) if self.done else []


def prefix_error(plan: MatrixMechanism, upto: int | None = None) -> float:
    """The noise on one coordinate of the sum of `upto` rounds; without it, the root mean square over all."""
    sums = Workload.prefix_sums(plan.rounds)
    square = sums.mean_square(plan.column) if upto is None else sums.square(plan.column, upto)
    return plan.standard_deviation * math.sqrt(square)


def eligible(last_round: Mapping[str, int], silo: str, round: int, separation: int) -> bool:
    """Whether a silo may take part in `round`, given the last round in which each took part.

    The sampler of a DP-FTRL job must select nobody else, in any attempt of the round.
    """
    return silo not in last_round or round - last_round[silo] >= separation
