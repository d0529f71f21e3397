"""Random-k under masks: the places that all silos of a round send, and what else cannot be added up."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.assembly import foreign_stages
from roundtable.core.encodings.sparse import RandomK
from roundtable.core.privacy_table import masking_of


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


def why_not_masked(job: JobConfig) -> str:
    """Why updates that travel as the job says cannot be masked and added up; "" where they can."""
    transfer = job.transfer
    said = f"transfer.up = {transfer.up!r} under secure aggregation"
    if transfer.up == "float32":
        return ""
    if transfer.automatic:
        return f"{said}: masked updates have all one form, and none is chosen for each silo; name one"
    if transfer.up.startswith("lowrank"):
        return (
            f"{said}: factors that each silo makes of its own update do not add up; common ones take two "
            "masked sums a round, of A Q and then of Pᵀ A, and a round has one: choose randomk(ratio=..., "
            "indices=cohort)"
        )
    if transfer.remembers:
        return (
            f"{said}: a silo does not learn what of its own update was counted after clipping and rounding, "
            'and cannot remember the rest: set transfer.feedback = "off"'
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
