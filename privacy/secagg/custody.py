"""What a silo keeps once its vector is masked, and the only code that gives a share away.

By then its own keys are erased; what remains are the shares that it holds for others. It reveals,
for each peer, exactly one of the two kinds and does so once: the self-mask share of a survivor or the
mask-key share of a silo that dropped out. The survivor set is agreed on first: the silo signs one pair
of members and survivors (U2, U3) and no other, and reveals only against signatures over the very same pair
by more than (n + corrupt)/2 silos. Two sets of so many share an honest silo, which signs one pair: **all
honest silos that reveal follow the same pair**, whatever the coordinator told them.

A silo that was told another U2 than the others laid fewer masks over its vector than they think. On the
full graph the threshold, 2t > n + corrupt, sees to it that its masks and its seed cannot both be undone. On
the sparse graph every silo signs its upload for the U2 that it masked among, and a holder agrees to no
survivor set unless each of its neighbours in it signed for the holder's own: **a seed that an honest silo
reveals is that of a silo that masked towards all of its neighbours in U2**.
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
from roundtable.privacy.secagg.payloads import Evidence, Survivors, members_to_bytes

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

    def masked_among(self, members: frozenset[int]) -> bytes:
        """What uploads are bound to, once it is known who shared secrets and is masked against."""
        bitmap = members_to_bytes(members, len(self.names))
        return hashlib.sha256(b"roundtable secagg members\0" + self.binding + bitmap).digest()

    def attested(self, index: int, survivors: frozenset[int]) -> list[int]:
        """The survivors whose announcements `index` must see, ascending: none on the full graph."""
        if self.parameters.full_graph:
            return []
        return [peer for peer in self.graph.neighbours(index) if peer in survivors]

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

    def agree(self, alive: Survivors) -> bytes:
        """Accept a survivor set, once, and return what is to be signed about it."""
        parameters, survivors = self.cohort.parameters, alive.survivors
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
        self._check_announcements(alive)
        self.survivors = survivors
        return self.cohort.consent_payload(self.members, survivors)

    def _check_announcements(self, alive: Survivors) -> None:
        cohort = self.cohort
        neighbours = cohort.attested(self.index, alive.survivors)
        if len(alive.announcements) != len(neighbours):
            raise ProtocolError(
                f"{len(alive.announcements)} announcements came where {len(neighbours)} neighbours survive"
            )
        binding = cohort.masked_among(self.members)
        for peer, (digest, signature) in zip(neighbours, alive.announcements, strict=True):
            name = cohort.names[peer]
            message = signed_bytes(Kind.MASKED, binding, name, digest)
            if not verifier(cohort.identities[peer], name)(signature, message):
                raise ProtocolError(
                    f"{name} did not sign that it masked among the members that this silo knows"
                )

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
