"""What of an update is masked: all of it, random-k's values, or factors by a common basis; and what cannot be
added up."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.assembly import foreign_stages
from roundtable.core.encodings.sparse import RandomK
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import DistributedLevel, ExampleLevel, masking_of


def shared_sample(job: JobConfig) -> RandomK | None:
    """The random-k whose values a masked job sums; None for one that sums all values."""
    if masking_of(job.privacy) is None or job.transfer.automatic:
        return None
    if foreign_stages(job.transfer.up):
        return None
    encoding = get_encoding(job.transfer.up)
    return encoding if isinstance(encoding, RandomK) else None


def sample_key(job: JobConfig, round: int) -> StreamKey:
    """What a round's places follow from; its attempts send the same ones."""
    return StreamKey(job.seed, round=round)


def values_sent(job: JobConfig, dimension: int) -> int:
    """How many values of an update of `dimension` a silo masks."""
    sample = shared_sample(job)
    return dimension if sample is None else sample.most(dimension)


def most_summed(job: JobConfig) -> int | None:
    """How many silos one sum of the job is over at most; None where the job does not say.

    In buffered rounds a buffer is a cohort.
    """
    return job.round.buffer or job.cohort.size


def values_masked(job: JobConfig, layout: Layout, round: int) -> int:
    """The length of the vectors whose sum a round (from 1) makes, from the layout of an update."""
    common = job.common_rank
    return layout.size if common is None else common.over(layout).values(round)


def why_not_masked(job: JobConfig) -> str:
    """Why updates that travel as the job says cannot be masked and added up; "" where they can."""
    transfer = job.transfer
    if isinstance(job.privacy, ExampleLevel) and not job.releases_sums:
        return (
            'privacy.secure_aggregation with privacy.level = "example": the update of a training by DP-SGD '
            "has no bounded norm, by which masks would round it; masks go with the sums of an analysis: "
            "leave secure_aggregation out"
        )
    said = f"transfer.up = {transfer.up!r} under secure aggregation"
    if transfer.up == "float32":
        return ""
    if transfer.automatic:
        return f"{said}: masked updates have all one form, and none is chosen for each silo; name one"
    if job.common_rank is not None:
        if isinstance(job.privacy, DistributedLevel):
            return (
                f"{said} and privacy.level = {job.privacy.level!r}: how many values a round has differs "
                "between odd and even ones, and what a round costs is agreed on for one number; choose "
                "randomk(ratio=..., indices=cohort)"
            )
        return ""
    if transfer.up.startswith("lowrank"):
        return (
            f"{said}: factors that each silo makes of its own update do not add up; set "
            "lowrank(rank=..., basis=cohort)"
        )
    if transfer.remembers:
        return (
            f"{said}: a silo does not learn what of its own update was counted after clipping and rounding, "
            'and cannot remember the rest: set transfer.feedback = "off", or choose '
            "lowrank(rank=..., basis=cohort)"
        )
    if foreign := foreign_stages(transfer.up):
        return (
            f"{said}: masked vectors travel in a form of their own, and nobody decodes those of one silo, so "
            f"{foreign[0]!r}, which is code of others, has nothing to do there: leave it out"
        )
    encoding = get_encoding(transfer.up)
    if encoding.traits.support == "own":
        return (
            f"{said}: each silo sends values of its own choice, which tells of its data and does not add up "
            "with those of others; set randomk(ratio=..., indices=cohort)"
        )
    if encoding.traits.support == "seeded":
        return f"{said}: each silo sends other values, which do not add up; set indices=cohort"
    if isinstance(encoding, RandomK) and encoding.shared:
        return ""
    return (
        f"{said}: masked vectors travel in a form of their own, of privacy.ring_bits a value; leave it out, "
        "or choose randomk(ratio=..., indices=cohort) alone"
    )
