"""From a job's level to what its rounds cost, and the noise that its budget asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.accountants import compose
from roundtable.privacy.accounting.calibration import solve_noise
from roundtable.privacy.accounting.charge import Charge, gaussian_charge, local_gaussian_charge
from roundtable.privacy.accounting.sampling import SamplingModel
from roundtable.privacy.config import PrivacyConfig
from roundtable.privacy.mechanisms.central_noise import CentralDP
from roundtable.privacy.mechanisms.clipping import AdaptiveClip
from roundtable.privacy.mechanisms.distributed import DistributedDP
from roundtable.privacy.mechanisms.ftrl import BandedFTRL

_STEP = 1.002


def ftrl_plan(
    config: PrivacyConfig, noise_multiplier: float, sampling: SamplingModel, rounds: int
) -> BandedFTRL:
    """The noise of a DP-FTRL job; without `separation` a silo waits until all others could have come."""
    assert config.clip_norm is not None
    separation = config.separation or max(1, int(sampling.population // sampling.cohort))
    return BandedFTRL(config.clip_norm, noise_multiplier, rounds, separation, config.bands)


def charges(
    config: PrivacyConfig,
    noise_multiplier: float,
    sampling: SamplingModel,
    dimension: int,
    rounds: int,
    upto: int,
) -> Sequence[Charge]:
    """What the first `upto` of `rounds` rounds cost; for `client_local` and `example`, one silo.

    A silo under `client_local` is charged for every round: whether it was chosen is not secret.
    """
    if config.level == "dp_ftrl":
        plan = ftrl_plan(config, noise_multiplier, sampling, rounds)
        return [plan.charge(round) for round in range(1, upto + 1)]
    return [_round(config, noise_multiplier, sampling, dimension).repeated_by(upto)]


def noise_for(config: PrivacyConfig, sampling: SamplingModel, dimension: int, rounds: int) -> float:
    """The noise multiplier of a job: as given, or the least that keeps all its rounds within the budget.

    Raises `PrivacyError` for a job without privacy, and where no noise keeps the budget.
    """
    if config.noise_multiplier is not None:
        return config.noise_multiplier
    if config.epsilon is None or config.delta is None:
        raise PrivacyError("a job without privacy has no noise")
    if config.level == "dp_ftrl":
        whole = gaussian_charge("client", {"sampling": "none"}, 1.0)
        return solve_noise(whole, config.epsilon, config.delta, config.accountant).noise_multiplier
    if config.level != "distributed":
        one = _round(config, 1.0, sampling, dimension)
        many = one.repeated_by(rounds)
        solved = solve_noise(many, config.epsilon, config.delta, config.accountant)
        return dict(solved.parts)[many.parts[0][0]] * (2.0 if many.relation == "replace_one" else 1.0)
    many = gaussian_charge("client", {"sampling": "none"}, 1.0, steps=rounds)
    noise = solve_noise(many, config.epsilon, config.delta, "rdp").noise_multiplier
    while compose(charges(config, noise, sampling, dimension, rounds, rounds), config.delta) > config.epsilon:
        noise *= _STEP
    return noise


def _round(config: PrivacyConfig, noise_multiplier: float, sampling: SamplingModel, dimension: int) -> Charge:
    assert config.clip_norm is not None
    if config.level == "client":
        adaptive = (
            AdaptiveClip.init(config.clip_norm, sampling.cohort) if config.clipping == "adaptive" else None
        )
        central = CentralDP(config.clip_norm, noise_multiplier, sampling.cohort, adaptive=adaptive)
        return central.charge(sampling.fields())
    if config.level == "client_local":
        return local_gaussian_charge(noise_multiplier)
    if config.level == "distributed":
        return DistributedDP.from_config(
            config, noise_multiplier, dimension, math.ceil(sampling.cohort)
        ).charge
    if config.level == "example":
        return _example(config, noise_multiplier)
    raise PrivacyError(f"privacy.level = {config.level!r} has no charge for a round")


def _example(config: PrivacyConfig, noise_multiplier: float) -> Charge:
    if config.population is None or config.batch_size is None or config.local_steps is None:
        raise PrivacyError(
            "a plan of example-level privacy needs privacy.population (the examples of a silo), "
            "privacy.batch_size "
            "and privacy.local_steps"
        )
    rate = config.batch_size / config.population
    parts = (("gradient", noise_multiplier),)
    return Charge("gaussian", "example", "poisson", parts, config.local_steps, rate=rate)
