"""Models that are a relay's: in a job with rounds within regions (`[regions] rounds`) a round that does not
go up gives a model of the region, which no coordinator has made, and the next round begins with it.

What a lying relay can do there: say that any model at all is its region's. Nobody at the silo sees the other
updates, so that nothing here can tell. What the silo holds it to: that its people have named this relay, that
the job, signed by its submitter, says which rounds these are, that the coordinator's model begins each series
of them, and that the relay has signed model, step and its records of the rounds so far. The statement is in
the silo's own log, the records are the relay's and named in the coordinator's: what does not fit together
shows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from roundtable.core.config import JobConfig
from roundtable.core.errors import IdentityError
from roundtable.core.identity.credentials import verify_identity
from roundtable.core.identity.signing import verify

POLICY = "([policy] regional_models)"


def is_within(job: JobConfig, round: int, phase: str) -> bool:
    """Whether the round's updates go to the region's relay, and no further."""
    up = job.regions.goes_up(round - 1, job.rounds)
    return job.regions.rounds > 1 and phase == "train" and round != up


@dataclass(frozen=True)
class RegionWord:
    """What a relay has signed at `time` of a model, but for its own name; nothing for the coordinator's."""

    statement: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    signature: bytes = b""


def check_region(
    word: RegionWord, job: JobConfig, round: int, relay: bytes, ca: bytes, trusted: Collection[str]
) -> dict[str, Any]:
    """What the relay has signed of the model with which the training of round `round` begins, for the silo's
    log; empty for one of the coordinator's.

    `relay` is the identity certificate (PEM) of the relay that the silo speaks to, b"" for none, `ca` the
    root's, `trusted` whose models this silo works with. IdentityError for a model that it does not take.
    """
    if job.regions.rounds == 1:
        if word.statement:
            raise IdentityError("the model is said to be a region's, and the job has no such rounds")
        return {}
    if not relay:
        raise IdentityError(
            "the job has rounds within regions (regions.rounds), and this silo is connected to the "
            "coordinator itself: it needs a relay, which agent.toml names"
        )
    name = verify_identity(relay, ca, role="relay")[0]
    if name not in trusted:
        named = ", ".join(sorted(trusted)) or "none"
        raise IdentityError(
            f"the job has rounds within regions, and this silo works with models of the relays {named}, not "
            f"of {name!r} {POLICY}"
        )
    if bool(word.statement) == (round == job.regions.first(round)):
        said = "is said to be a region's own" if word.statement else "has no relay's signature"
        whose = "the coordinator's model" if word.statement else "a region's"
        raise IdentityError(f"round {round} begins with {whose}, and the model that is named {said}")
    if not word.statement:
        return {}
    values = {**word.statement, "relay": name}
    verify(relay, ca, "relay", "region", values, word.signature, at=word.time)
    return {**values, "signature": word.signature.hex(), "certificate": relay.decode()}
