"""What other mechanisms would do at a job's ε and δ: the comparison of `roundtable privacy plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roundtable.core.privacy_table import Private
from roundtable.privacy.accounting.calibration import solve_noise
from roundtable.privacy.accounting.charge import gaussian_charge
from roundtable.privacy.accounting.sampling import SamplingModel
from roundtable.privacy.correlation import MOST_BANDS, likely_groups, memory
from roundtable.privacy.mechanisms.factorise import BUFFERS, Banded, optimal_banded, optimal_buffered
from roundtable.privacy.mechanisms.ftrl import MatrixMechanism, prefix_error
from roundtable.privacy.mechanisms.toeplitz import Workload


@dataclass(frozen=True)
class Alternative:
    """Another mechanism at the same ε and δ; `prefix_error` is its noise on all updates' sum over C.

    `sampled` says whether its ε rests on a secret draw.
    """

    name: str
    noise_multiplier: float
    prefix_error: float
    signal_to_noise: float
    remark: str
    sampled: bool


@dataclass(frozen=True)
class _Budget:
    """What all alternatives spend, and what they train on."""

    privacy: Private
    epsilon: float
    sampling: SamplingModel
    rounds: int
    dimension: int

    def noise(self, steps: int, rate: float | None = None) -> float:
        """The noise multiplier of so many releases, Poisson-sampled at a rate or not at all."""
        how = {"sampling": "none"} if rate is None else {"sampling": "poisson", "rate": rate}
        charge = gaussian_charge("client", how, 1.0, steps=steps)
        spend = (self.epsilon, self.privacy.delta, self.privacy.accountant)
        return solve_noise(charge, *spend).noise_multiplier

    def alternative(self, name: str, noise: float, error: float, remark: str, sampled: bool) -> Alternative:
        signal = self.rounds * self.sampling.cohort / (error * math.sqrt(self.dimension))
        return Alternative(name, noise, error, signal, remark, sampled)

    def independent(self, name: str, rate: float | None, remark: str) -> Alternative:
        noise = self.noise(self.rounds, rate)
        error = noise * math.sqrt(self.rounds)
        return self.alternative(name, noise, error, remark, rate is not None)

    def correlated(self, name: str, ftrl: MatrixMechanism, keys: str) -> Alternative:
        kept = f"keeps {ftrl.factorisation.kept} vectors ({memory(ftrl.factorisation, self.dimension)})"
        remark = f"level = dp_ftrl, separation = {ftrl.separation}, {keys}: {kept}"
        error = prefix_error(ftrl, self.rounds)
        return self.alternative(name, ftrl.noise_multiplier, error, remark, ftrl.rate is not None)


def alternatives_to(
    privacy: Private, epsilon: float, sampling: SamplingModel, rounds: int, dimension: int
) -> tuple[Alternative, ...]:
    """Independent and correlated noise, sampled and not, for cohorts of the job's expected size."""
    budget = _Budget(privacy, epsilon, sampling, rounds, dimension)
    share, whole = sampling.cohort / sampling.population, budget.noise(1)
    separation, sums = max(1, int(1.0 / share)), Workload.prefix_sums(rounds)
    banded = optimal_banded(sums, min(separation, MOST_BANDS), separation)
    buffered = optimal_buffered(sums, BUFFERS, separation)
    groups = likely_groups(whole, rounds, share)
    rate = min(1.0, groups * share)
    turns = budget.noise(math.ceil(rounds / groups), rate)
    single: Banded = optimal_banded(sums, groups, rounds)
    secret = "the draw must be secret"
    return (
        budget.independent("DP-FedAvg, Poisson sampling", share, f"strategy = poisson; {secret}"),
        budget.independent("DP-FedAvg, no amplification", None, "any selection"),
        budget.correlated(
            "DP-FTRL, banded",
            MatrixMechanism(1.0, whole, rounds, separation, banded),
            f"bands = {banded.bands}",
        ),
        budget.correlated(
            "DP-FTRL, BLT",
            MatrixMechanism(1.0, whole, rounds, separation, buffered),
            f"buffers = {buffered.kept}",
        ),
        budget.correlated(
            "DP-FTRL, banded, Poisson sampling",
            MatrixMechanism(1.0, turns, rounds, groups, single, rate),
            f"bands = {groups}, cohorts = hidden, strategy = poisson, probability = {rate:.4g}; {secret}",
        ),
    )
