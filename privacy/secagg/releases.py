"""A silo's memory of the sums that it helped to make: what a state machine asks before anything leaves.

One attempt at a time would be safe without memory. Several are not: two sums over cohorts of which one
silo differs give that silo away, and repeated noisy sums of one update average the noise away.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Protocol

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.custody import Cohort


class Releases(Protocol):
    """What is durable at the silo when a method returns. Both may be called again with the same values."""

    def mask(self, cohort: Cohort) -> None:
        """The silo's masked vector is about to leave, for a sum over silos of `cohort`.

        ProtocolError where earlier sums forbid it, PrivacyError where the silo's account does not hold it.
        """
        ...

    def unmask(self, cohort: Cohort, survivors: Iterable[int]) -> None:
        """The silo is about to help to unmask the sum over these members of `cohort`.

        Called before its consent on a sparse graph, and before its shares on the full one: there the
        thresholds of two attempts intersect in an honest silo by themselves. ProtocolError where
        another attempt of the round, or another sum from the same model, was helped before.
        """
        ...


class MemoryReleases:
    """`Releases` for simulations: one attempt of each round, forgotten with the process."""

    def __init__(self) -> None:
        self._unmasked: dict[tuple[str, int], bytes] = {}

    def mask(self, cohort: Cohort) -> None:
        """Nothing is known of other sums here."""

    def unmask(self, cohort: Cohort, survivors: Iterable[int]) -> None:
        key = cohort.session.job, cohort.session.round
        if self._unmasked.setdefault(key, cohort.binding) != cohort.binding:
            raise ProtocolError(other_attempt(cohort.session.round))


def other_attempt(round: int) -> str:
    """Why shares for an attempt are refused."""
    return (
        f"another attempt of round {round} was unmasked already; a second sum over other survivors would "
        "give their difference away"
    )


def members_digest(cohort: Cohort, members: Iterable[int] | None = None) -> str:
    """A set of silos by their names and identity keys (all of the cohort by default), hexadecimal."""
    chosen = sorted(range(len(cohort.names)) if members is None else set(members))
    digest = hashlib.sha256(b"roundtable secagg members\0")
    for index in chosen:
        name, identity = cohort.names[index].encode(), cohort.identities[index]
        digest.update(struct.pack("<HH", len(name), len(identity)) + name + identity)
    return digest.hexdigest()
