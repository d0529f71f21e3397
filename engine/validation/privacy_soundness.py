"""Refuses, before round 1, settings that break a guarantee of differential privacy together."""

from __future__ import annotations

from roundtable.aggregation import AggregationConfig
from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import (
    ExampleLevel,
    FtrlLevel,
    NoPrivacy,
    OwnNoise,
    Private,
    has_secret_cohorts,
    masking_of,
)
from roundtable.privacy import LEAST_DRAWN_NOISE


def check_soundness(job: JobConfig, aggregation: AggregationConfig) -> None:
    """Raises PrivacyError, naming the key, for a job that would break the guarantee that it asks for."""
    privacy = job.privacy
    if isinstance(privacy, NoPrivacy):
        return
    if aggregation.weighting != "uniform":
        raise PrivacyError(
            f"aggregation.weighting = {aggregation.weighting!r}: a silo could claim any weight and so any "
            "influence, and how many examples it has is private itself; under differential privacy set "
            'weighting = "uniform"'
        )
    if job.cohort.strategy == "data_size":
        raise PrivacyError(
            'cohort.strategy = "data_size": how many examples a silo has is private, and is not sent under '
            'differential privacy; choose "uniform", "poisson" or another strategy'
        )
    if job.cohort.on_failure == "skip" and not isinstance(privacy, OwnNoise):
        raise PrivacyError(
            f'cohort.on_failure = "skip": level {privacy.level!r} plans its noise over rounds that '
            'all make a model; leave it at "pause"'
        )
    # What a simulation's server measures is of no silo's data.
    stops = job.stop.metric is not None and not job.stop.central
    if not privacy.public_evaluation and (stops or job.evaluation.every != 0):
        raise PrivacyError(
            "evaluation and stop: metrics of silos are exact and would pass by the noise; set "
            "evaluation.every = 0 and leave out stop.metric, or state that the silos' test data are public "
            "by privacy.public_evaluation = true"
        )
    _check_drawn_noise(job, privacy)
    _check_steps(job, privacy)
    if isinstance(privacy, ExampleLevel):
        _check_example_level(job)
    else:
        _check_client_level(job, aggregation, privacy)


def _check_drawn_noise(job: JobConfig, privacy: Private) -> None:
    """Refuses noise under which a sample hides nothing: only a Rényi curve tells its epsilon in time."""
    noise = privacy.noise_multiplier
    drawn = isinstance(privacy, ExampleLevel) or (
        job.cohort.strategy == "poisson" and has_secret_cohorts(privacy)
    )
    if drawn and privacy.accountant != "rdp" and noise is not None and noise < LEAST_DRAWN_NOISE:
        raise PrivacyError(
            f"privacy.noise_multiplier = {noise:g}: nobody is protected by so little noise. One step that a "
            f"unit takes part in costs an epsilon above {1 / (2 * noise * noise):.3g}, and drawing units by "
            f"chance hides nothing of it; give at least {LEAST_DRAWN_NOISE:g} (about 0.5 is the least that "
            'is of use), give a budget as epsilon, or set level = "none"'
        )


def _check_steps(job: JobConfig, privacy: Private) -> None:
    """Refuses that one silo of a sum changes what others train."""
    if job.algorithm.work == "by_speed" and not isinstance(privacy, OwnNoise):
        raise PrivacyError(
            f'algorithm.work = "by_speed" under privacy.level = {privacy.level!r}: how many steps a silo '
            "takes follows from how fast the others of its cohort are, so that one silo changes the updates "
            'of others as well, and the noise hides one term of the sum; set work = "equal"'
        )


def _check_client_level(job: JobConfig, aggregation: AggregationConfig, privacy: Private) -> None:
    if privacy.population is not None and (job.cohort.size or 0) > privacy.population:
        raise PrivacyError(
            f"privacy.population ({privacy.population}) is smaller than cohort.size ({job.cohort.size}); "
            "lower one or raise the other"
        )
    masking = masking_of(privacy)
    # Over groups, noise is in each group's sum, and whatever is done with the sums costs nothing more.
    grouped = masking is not None and masking.group_size is not None
    if not grouped and (aggregation.rule != "mean" or aggregation.pre):
        raise PrivacyError(
            f"aggregation.rule: noise is calibrated to the bounded mean; {aggregation.rule!r} with "
            f'{len(aggregation.pre)} pre-aggregations has another sensitivity. Use rule = "mean" without pre'
        )
    if aggregation.validation != "exclude" or aggregation.max_norm is not None:
        raise PrivacyError(
            "aggregation.validation: clip_norm already bounds every update; leave policy and max_norm out"
        )
    if job.cohort.over_selection != 1.0:
        raise PrivacyError(
            "cohort.over_selection: who answers first is not chance; leave it at 1 under privacy"
        )
    if has_secret_cohorts(privacy) and job.evaluation.every and job.evaluation.clients == "cohort":
        raise PrivacyError(
            'evaluation.clients = "cohort": whose test data a metric is of would tell who was drawn, and '
            'privacy.cohorts = "hidden" rests on nobody knowing; set evaluation.clients = "all", or '
            'privacy.cohorts = "known", which is charged without amplification'
        )
    if isinstance(privacy, FtrlLevel) and privacy.cohorts == "hidden":
        if job.cohort.strategy != "poisson":
            raise PrivacyError(
                f'cohort.strategy = "{job.cohort.strategy}": with privacy.cohorts = "hidden" level dp_ftrl '
                "is amplified by Poisson sampling within groups, and by nothing else; set cohort.strategy = "
                '"poisson" and cohort.probability, or privacy.cohorts = "known"'
            )
    elif isinstance(privacy, FtrlLevel) and job.cohort.strategy == "poisson":
        raise PrivacyError(
            'cohort.strategy = "poisson": level dp_ftrl relies on how far apart a silo takes part, not on '
            'chance, and needs cohorts of a fixed size; choose "uniform" or "round_robin", or set '
            'privacy.cohorts = "hidden" and be amplified'
        )


def _check_example_level(job: JobConfig) -> None:
    if job.algorithm.max_gradient_norm is not None:
        raise PrivacyError(
            "algorithm.max_gradient_norm: privacy.clip_norm bounds the gradient of every example already; "
            "leave it out"
        )
