"""Which jobs make sense under secure aggregation."""

from __future__ import annotations

from roundtable.aggregation import AggregationConfig
from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.privacy import PrivacyConfig
from roundtable.privacy.secagg import MINIMUM_COHORT


def check_secure(job: JobConfig, aggregation: AggregationConfig, privacy: PrivacyConfig) -> None:
    """Raises PrivacyError for what nobody can do to updates that nobody sees."""
    hidden = "under secure aggregation nobody sees a single update"
    if privacy.level not in ("none", "distributed"):
        raise PrivacyError(
            f"privacy.level = {privacy.level!r} is not offered with secure aggregation; "
            'use "none", or "distributed" for noise in shares'
        )
    if privacy.clip_norm is None:
        raise PrivacyError(
            "privacy.clip_norm is missing: secure aggregation rounds updates of a bounded norm; "
            "a first guess is the median norm of an update"
        )
    if aggregation.rule != "mean" or aggregation.pre:
        raise PrivacyError(
            f"aggregation.rule = {aggregation.rule!r} with {len(aggregation.pre)} pre-aggregations: "
            f"{hidden}, "
            'so that only their mean can be had; use rule = "mean" without pre'
        )
    if aggregation.weighting == "inverse_loss":
        raise PrivacyError(
            f'aggregation.weighting = "inverse_loss": {hidden} nor its loss; use "examples" or "uniform"'
        )
    if aggregation.validation != "exclude" or aggregation.max_norm is not None:
        raise PrivacyError(
            f"aggregation.validation: {hidden}; silos clip to clip_norm, so leave policy and max_norm out"
        )
    if not privacy.public_evaluation and (job.evaluation.every != 0 or job.stop.metric is not None):
        raise PrivacyError(
            "evaluation and stop: test metrics of single silos would leave them in the clear, beside the "
            "secure sum; set evaluation.every = 0 and leave out stop.metric (the training loss is summed "
            "securely), or state that the silos' test data are public by privacy.public_evaluation = true"
        )
    _check_secure_rounds(job)


def fewest(job: JobConfig) -> int:
    """The clients below which a round need not begin: fewer hide nothing from each other."""
    return MINIMUM_COHORT if job.privacy.get("secure_aggregation") else 0


def fewest_updates(job: JobConfig, size: int) -> int:
    """The updates below which a cohort of `size` cannot be unmasked: so many must answer to the end."""
    return max(MINIMUM_COHORT, 2 * size // 3 + 1) if job.privacy.get("secure_aggregation") else 0


def _check_secure_rounds(job: JobConfig) -> None:
    cohort = job.cohort
    if cohort.size is not None and cohort.size < MINIMUM_COHORT:
        raise PrivacyError(
            f"cohort.size = {cohort.size}: a sum of fewer than {MINIMUM_COHORT} silos hides none of them; "
            "leave secure_aggregation out, or ask more silos"
        )
    if cohort.over_selection != 1.0:
        raise PrivacyError(
            "cohort.over_selection: whoever is not waited for counts as a dropout of secure aggregation; "
            "leave it at 1"
        )
    if cohort.strategy == "data_size":
        raise PrivacyError(
            'cohort.strategy = "data_size": example counts stay hidden under secure aggregation'
        )
    if job.transfer.encoding != "float32":
        raise PrivacyError(
            f"transfer.encoding = {job.transfer.encoding!r}: masked vectors travel in a form of their own; "
            "leave it out"
        )
