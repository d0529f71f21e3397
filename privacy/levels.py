"""From a job's level to what its rounds cost, and the noise that its budget asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import (
    ClientLevel,
    ClientLocalLevel,
    DistributedLevel,
    ExampleLevel,
    FtrlLevel,
    Private,
)
from roundtable.privacy.accounting.accountants import compose
from roundtable.privacy.accounting.calibration import solve_noise
from roundtable.privacy.accounting.charge import Charge, gaussian_charge, local_gaussian_charge
from roundtable.privacy.accounting.sampling import SamplingModel
from roundtable.privacy.mechanisms.central_noise import CentralDP
from roundtable.privacy.mechanisms.clipping import AdaptiveClip
from roundtable.privacy.mechanisms.distributed import DistributedDP
from roundtable.privacy.mechanisms.ftrl import BandedFTRL

_STEP = 1.002


def ftrl_plan(
    privacy: FtrlLevel, noise_multiplier: float, sampling: SamplingModel, rounds: int
) -> BandedFTRL:
    """The noise of a DP-FTRL job; without `separation` a silo waits until all others could have come."""
    separation = privacy.separation or max(1, int(sampling.population // sampling.cohort))
    return BandedFTRL(privacy.clip_norm, noise_multiplier, rounds, separation, privacy.bands)


def charges(
    privacy: Private,
    noise_multiplier: float,
    sampling: SamplingModel,
    dimension: int,
    rounds: int,
    upto: int,
) -> Sequence[Charge]:
    """What the first `upto` of `rounds` rounds cost; for `client_local` and `example`, one silo.

    A silo under `client_local` is charged for every round: whether it was chosen is not secret.
    """
    match privacy:
        case FtrlLevel():
            plan = ftrl_plan(privacy, noise_multiplier, sampling, rounds)
            return [plan.charge(round) for round in range(1, upto + 1)]
        case _:
            return [_round(privacy, noise_multiplier, sampling, dimension).repeated_by(upto)]


def noise_for(privacy: Private, sampling: SamplingModel, dimension: int, rounds: int) -> float:
    """The noise multiplier of a job: as given, or the least that keeps all its rounds within the budget.

    Raises `PrivacyError` where no noise keeps the budget.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.epsilon is not None, "a level needs one of the two"
    budget = (privacy.epsilon, privacy.delta)
    match privacy:
        case FtrlLevel():
            whole = gaussian_charge("client", {"sampling": "none"}, 1.0)
            return solve_noise(whole, *budget, privacy.accountant).noise_multiplier
        case DistributedLevel():
            many = gaussian_charge("client", {"sampling": "none"}, 1.0, steps=rounds)
            noise = solve_noise(many, *budget, "rdp").noise_multiplier
            while (
                compose(charges(privacy, noise, sampling, dimension, rounds, rounds), privacy.delta)
                > privacy.epsilon
            ):
                noise *= _STEP
            return noise
        case _:
            many = _round(privacy, 1.0, sampling, dimension).repeated_by(rounds)
            solved = solve_noise(many, *budget, privacy.accountant)
            return dict(solved.parts)[many.parts[0][0]] * (2.0 if many.relation == "replace_one" else 1.0)


def _round(
    privacy: ClientLevel | ClientLocalLevel | DistributedLevel | ExampleLevel,
    noise_multiplier: float,
    sampling: SamplingModel,
    dimension: int,
) -> Charge:
    match privacy:
        case ClientLevel():
            adaptive = privacy.clipping == "adaptive"
            clip = AdaptiveClip.init(privacy.clip_norm, sampling.cohort) if adaptive else None
            central = CentralDP(privacy.clip_norm, noise_multiplier, sampling.cohort, adaptive=clip)
            return central.charge(sampling.fields())
        case ClientLocalLevel():
            return local_gaussian_charge(noise_multiplier)
        case DistributedLevel():
            silos = math.ceil(sampling.cohort)
            return DistributedDP.of_job(privacy, noise_multiplier, dimension, silos).charge
        case ExampleLevel():
            return _example(privacy, noise_multiplier)


def _example(privacy: ExampleLevel, noise_multiplier: float) -> Charge:
    if privacy.population is None or privacy.batch_size is None or privacy.local_steps is None:
        raise PrivacyError(
            "a plan of example-level privacy needs privacy.population (the examples of a silo), "
            "privacy.batch_size and privacy.local_steps"
        )
    rate = privacy.batch_size / privacy.population
    parts = (("gradient", noise_multiplier),)
    return Charge("gaussian", "example", "poisson", parts, privacy.local_steps, rate=rate)
