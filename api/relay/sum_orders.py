"""What a relay reads in an order: whether the job has it add updates up, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any, cast, get_args

from roundtable.aggregation.weighting import Weighting
from roundtable.client.door.incoming import ModelWork, StepInstruction
from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import ConfigError, ProtocolError
from roundtable.core.identity.signing import PATH_MARK
from roundtable.core.privacy_table import masking_of
from roundtable.privacy.secagg.masks import MASKED, RING_BITS

EARLIER = 0.9


@dataclass(frozen=True)
class SumTerms:
    """What updates of one step must be for their relay to add them up: with `ring`, masked numbers of so many
    bits; otherwise values, whose mean is made by the `weighting`."""

    weighting: Weighting
    encoding: str
    layout: str
    model: str
    ring: int = 0

    def plain(self) -> list[str | int]:
        """In a JSON-able form."""
        return list(astuple(self))

    @classmethod
    def of(cls, plain: Sequence[Any]) -> SumTerms:
        """From what `plain` gave; ValueError or TypeError for anything else."""
        *words, ring = plain
        weighting, encoding, layout, model = map(str, words)
        if weighting not in get_args(Weighting):
            raise ValueError(f"{weighting!r} is no weighting")
        if ring not in (0, *RING_BITS):
            raise ValueError(f"{ring!r} bits are no ring")
        return cls(cast("Weighting", weighting), encoding, layout, model, ring)


@dataclass(frozen=True)
class SumOrder:
    """A silo was asked for an update that is to be added up; no later than `seconds` from now. Its model has
    so many bytes."""

    terms: SumTerms
    seconds: float
    model_bytes: int = 0


def sum_order_of(instruction: StepInstruction) -> SumOrder | None:
    """The order in an instruction; None where updates are to be handed on. ProtocolError for a job that
    cannot be read."""
    work = instruction.work
    if not isinstance(work, ModelWork) or instruction.step.phase != "train":
        return None
    try:
        job = job_in(instruction.config)
    except ConfigError as error:
        raise ProtocolError(f"the job of {instruction.step} cannot be read: {error}") from error
    masking = masking_of(job.privacy)
    if not job.regions.sum or (masking is not None and masking.group_size is not None):
        return None
    encoding, ring = (MASKED, masking.ring_bits) if masking is not None else (job.transfer.up, 0)
    terms = SumTerms(job.aggregation.weighting, encoding, work.layout, work.model.digest, ring)
    return SumOrder(terms, job.regions.close * instruction.seconds, work.model.size)


def earlier(order: SumOrder, name: str, way: str) -> SumOrder:
    """The order at the relay `name` on a silo's way: each relay before the last closes its sums earlier than
    the next one, which waits for them. A way is the silo's word: one that is not by this relay is not served,
    and until that is known the order stays as it is."""
    path = way.split(PATH_MARK)[::-1]
    after = path.index(name) if name in path else 0
    return replace(order, seconds=order.seconds * EARLIER**after)


@lru_cache(maxsize=16)
def job_in(config: str) -> JobConfig:
    """The job of an order; ConfigError for one that cannot be read."""
    return job_from_json(config)
