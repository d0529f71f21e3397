"""Refuses, before round 1, what buffered rounds cannot be combined with."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.privacy_table import ClientLevel, FtrlLevel, masking_of


def check_buffered(job: JobConfig) -> None:
    """Raises ConfigError or PrivacyError, naming the key, for what needs rounds that do not overlap."""
    cohort, size = job.cohort, job.round.buffer or 0
    mode = 'round.mode = "buffered"'
    _check_masks(job, mode)
    if isinstance(job.privacy, ClientLevel | FtrlLevel):
        raise PrivacyError(
            f"privacy.level = {job.privacy.level!r}: with {mode} who answers first, and with that who else "
            "is asked, depends on the silos' data, which the accountant of a noisy sum whose cohort is drawn "
            'does not allow; use "distributed", where each sum is charged without a draw, or "client_local" '
            'or "example", where each silo keeps an account of its own'
        )
    if cohort.deadline_percentile is not None:
        raise ConfigError(
            f"cohort.deadline_percentile is of a cohort that is asked at one time, and {mode} asks each "
            "client by itself; leave it out"
        )
    if cohort.strategy == "poisson":
        raise ConfigError(
            f'cohort.strategy = "poisson" draws one cohort for each round, and {mode} draws none; '
            "choose another strategy"
        )
    if cohort.size is not None or cohort.over_selection != 1.0:
        raise ConfigError(
            f"cohort.size and cohort.over_selection: {mode} has no cohorts; round.concurrency is how many "
            "clients train at a time, round.buffer how many updates make a model"
        )
    if cohort.minimum is not None and cohort.minimum > size:
        raise ConfigError(
            f"cohort.minimum = {cohort.minimum} is above round.buffer = {size}: no round could ever succeed"
        )


def _check_masks(job: JobConfig, mode: str) -> None:
    """Under masks a buffer is one cohort of silos that trained from one model, perhaps an older one."""
    masking = masking_of(job.privacy)
    if masking is None:
        return
    with_masks = f"with {mode} and secure aggregation"
    if masking.group_size is not None:
        raise PrivacyError(
            f"privacy.group_size: {with_masks} a buffer is one group, of silos that trained from one model, "
            'and a rule over groups would have one row; leave it out, and take rule = "mean"'
        )
    if job.evaluation.bounds:
        raise PrivacyError(
            f"evaluation.bounds: {with_masks} a sum is over silos that began with an older model, and what "
            "they measure is not of the round's; leave it out, and set evaluation.every = 0"
        )
    if job.transfer.up != "float32":
        raise PrivacyError(
            f"transfer.up = {job.transfer.up!r}: {with_masks} the round that an update is masked in is not "
            "known while it is trained, and which values travel follows from the round; set transfer.up = "
            '"float32"'
        )
