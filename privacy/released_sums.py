"""The noise of a job whose silos release sums of their records, each with noise of its own."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy.accounting.accountants import compose
from roundtable.privacy.levels import sums_charges


def sums_noise(job: JobConfig) -> float:
    """The noise multiplier; one record changes all sums of a silo, in all rounds, by 1 at most (L2).

    Every party asks this of the job before anything is done. PrivacyError for a job whose settings do not
    agree, or whose noise costs more than the epsilon that it states.
    """
    privacy, stated = job.privacy, job.algorithm.sums_noise()
    if not isinstance(privacy, ExampleLevel) or stated is None:
        raise PrivacyError("sums of records leave a silo with noise under privacy.level = 'example' alone")
    if privacy.noise_multiplier != stated or privacy.clip_norm != 1.0:
        raise PrivacyError(
            f"algorithm.noise_multiplier = {stated:g}, privacy.noise_multiplier = {privacy.noise_multiplier} "
            f"and privacy.clip_norm = {privacy.clip_norm:g}: the first two are the same, and the third is 1, "
            "what a record changes; `roundtable analyse` sets all of it"
        )
    shares = job.algorithm.sums_shares()
    if job.rounds != len(shares) or job.stop.metric is not None:
        raise PrivacyError(
            f"rounds = {job.rounds}: the noise of these sums is for {len(shares)}; set rounds = "
            f"{len(shares)}, and leave out stop.metric"
        )
    cost = compose(sums_charges(job, stated), privacy.delta, privacy.accountant)
    if privacy.epsilon is not None and cost > privacy.epsilon:
        raise PrivacyError(
            f"privacy.noise_multiplier = {stated:g} costs epsilon = {cost:.4g} at delta = {privacy.delta:g}, "
            f"above the {privacy.epsilon:g} that the job states"
        )
    return stated
