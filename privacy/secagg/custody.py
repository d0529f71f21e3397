"""What a silo keeps once its vector is masked, and the only code that gives a share away.

By then its own keys are erased; what remains are the shares that it holds for others. It reveals,
for each peer, exactly one of the two kinds and does so once: the self-mask share of a survivor or the
mask-key share of a silo that dropped out. The survivor set is agreed on first: the silo signs one set
and no other, and reveals only against as many signatures over the very same set as the parameters demand.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.framing import Kind, signed_bytes
from roundtable.privacy.secagg.graph import Graph
from roundtable.privacy.secagg.keys import KEY_BYTES, Session, verifier, with_beacon
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.payloads import Evidence, members_from_bytes, members_to_bytes

PAIR_BYTES = 2 * KEY_BYTES


@dataclass(frozen=True)
class Cohort:
    """The silos of an attempt by index, with their identity keys, and what all of them are bound to."""

    session: Session
    parameters: SecAggParameters
    names: tuple[str, ...]
    identities: tuple[bytes, ...]
    sid: bytes
    beacon: bytes

    @functools.cached_property
    def graph(self) -> Graph:
        return Graph(self.parameters.n, self.parameters.k, self.beacon)

    @functools.cached_property
    def binding(self) -> bytes:
        return with_beacon(self.sid, self.beacon)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The index of every silo by its name."""
        return {name: index for index, name in enumerate(self.names)}

    def with_beacon(self, beacon: bytes) -> Cohort:
        return replace(self, beacon=beacon)

    def peers_held_by(self, index: int, members: frozenset[int]) -> list[int]:
        """The members of whose secrets `index` holds a share, ascending: holding is mutual."""
        return [peer for peer in self.graph.holders(index) if peer in members]

    def consent_payload(self, members: frozenset[int], survivors: frozenset[int]) -> bytes:
        """What every survivor signs: the silos that shared secrets, and those whose vector is summed."""
        n = len(self.names)
        return hashlib.sha256(members_to_bytes(members, n) + members_to_bytes(survivors, n)).digest()


@dataclass
class Custody:
    """The shares that one silo holds for its peers, and what it has said about the survivors."""

    cohort: Cohort
    index: int
    members: frozenset[int]
    minimum_cohort: int
    upload: bytes
    held: bytearray
    survivors: frozenset[int] | None = None

    @property
    def agreed(self) -> frozenset[int]:
        """The survivor set that was signed; ProtocolError before."""
        if self.survivors is None:
            raise ProtocolError("shares were asked for before a survivor set was agreed on")
        return self.survivors

    def agree(self, payload: bytes) -> bytes:
        """Accept a survivor set, once, and return what is to be signed about it."""
        parameters = self.cohort.parameters
        survivors = members_from_bytes(payload, parameters.n)
        needed = max(parameters.least, self.minimum_cohort)
        if not survivors <= self.members:
            stranger = self.cohort.names[min(survivors - self.members)]
            raise ProtocolError(f"the coordinator counts {stranger} as a survivor, which shared no secrets")
        if self.index not in survivors:
            raise ProtocolError(
                "the coordinator counts this silo as dropped although it submitted its vector"
            )
        if len(survivors) < needed:
            raise ProtocolError(f"{len(survivors)} silos survive, {needed} are needed to keep any one hidden")
        if self.survivors not in (None, survivors):
            raise ProtocolError("the coordinator names another survivor set than the one already signed")
        self.survivors = survivors
        return self.cohort.consent_payload(self.members, survivors)

    def reveal(self, evidence: Evidence) -> bytes:
        """One share for each peer, the kind decided by the agreed set; ProtocolError without evidence."""
        survivors = self.agreed
        self._check(evidence, survivors)
        revealed = []
        for place, peer in enumerate(self.cohort.peers_held_by(self.index, self.members)):
            start = place * PAIR_BYTES + (KEY_BYTES if peer in survivors else 0)
            revealed.append(bytes(self.held[start : start + KEY_BYTES]))
        return b"".join(revealed)

    def erase(self) -> None:
        """Forget all shares."""
        self.held[:] = bytes(len(self.held))
        self.held.clear()

    def _check(self, evidence: Evidence, survivors: frozenset[int]) -> None:
        payload = self.cohort.consent_payload(self.members, survivors)
        signers = [index for index, _ in evidence.signatures]
        if len(set(signers)) != len(signers):
            raise ProtocolError("the evidence for the survivor set counts a signature twice")
        if not survivors.issuperset(signers):
            raise ProtocolError("the evidence for the survivor set is signed by a silo outside of it")
        if len(signers) < self.cohort.parameters.consents:
            raise ProtocolError(
                f"{len(signers)} silos signed the survivor set, {self.cohort.parameters.consents} must"
            )
        for index, signature in evidence.signatures:
            name = self.cohort.names[index]
            message = signed_bytes(Kind.CONSENT, self.cohort.binding, name, payload)
            if not verifier(self.cohort.identities[index], name)(signature, message):
                raise ProtocolError(
                    f"{name} did not sign this survivor set: the coordinator tells two stories"
                )
