"""Refuses, before round 1, what buffered rounds cannot be combined with."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.privacy_table import ClientLevel, DistributedLevel, FtrlLevel, masking_of


def check_buffered(job: JobConfig) -> None:
    """Raises ConfigError or PrivacyError, naming the key, for what needs rounds that do not overlap."""
    cohort, size = job.cohort, job.round.buffer or 0
    mode = 'round.mode = "buffered"'
    if masking_of(job.privacy) is not None:
        raise PrivacyError(
            f"privacy.secure_aggregation: masks cancel among silos that work on one round together, and with "
            f"{mode} there is no such round; choose one of the two"
        )
    if isinstance(job.privacy, ClientLevel | FtrlLevel | DistributedLevel):
        raise PrivacyError(
            f"privacy.level = {job.privacy.level!r}: with {mode} who answers first, and with that who else "
            "is asked, depends on the silos' data, which the accountant of a noisy sum does not allow; use "
            '"client_local" or "example", where each silo keeps an account of its own'
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
