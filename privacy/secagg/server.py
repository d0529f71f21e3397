"""The coordinator's side of one attempt: a state machine without I/O that never sees a single vector bare.

`receive` takes a silo's message, `fold` takes a masked vector with its header, and `advance` closes
the phase, at the caller's deadline or when `ready`, and returns the next message for each silo that
is still in. Silos that did not answer by then have dropped out. The phases are

    ADVERTISE → [REVEAL, sparse graph only] → SHARES → MASKED → CONSENT → UNMASK → DONE

The object is a function of the messages that it took and nothing else, so a coordinator that stored
them can be brought back by taking them again in the same order. Below the threshold `advance` raises
ProtocolError, the attempt has failed, and nothing was revealed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import blake3
import numpy as np
import numpy.typing as npt

from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.framing import Envelope, Kind, seal, unseal
from roundtable.privacy.secagg.graph import NONCE_BYTES, combine_beacon, commit
from roundtable.privacy.secagg.keys import Session, session_id, verifier
from roundtable.privacy.secagg.masks import Ring, add_wire, reduce_ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.payloads import (
    DIGEST_BYTES,
    Advert,
    Evidence,
    Inbox,
    Peer,
    Peers,
    Shares,
    Survivors,
    exactly,
    reason_from_bytes,
    unmask_from_bytes,
)
from roundtable.privacy.secagg.recovery import Reconstruction, remaining_masks, unmask

Body: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


class ServerPhase(Enum):
    """The message that the coordinator collects, or how the attempt ended."""

    ADVERTISE = Kind.ADVERTISE
    REVEAL = Kind.REVEAL
    SHARES = Kind.SHARES
    MASKED = Kind.MASKED
    CONSENT = Kind.CONSENT
    UNMASK = Kind.UNMASK
    DONE = "done"
    FAILED = "failed"


class SecAggServer:
    """The coordinator in one attempt.

    `directory` maps the invited silos to their enrolled Ed25519 keys, `plan` is
    `choose_parameters` for all of them. `workspace` is where the sum is built, (length,) of the
    ring's dtype: a writable memory map for vectors beyond memory, fresh memory by default. `total` is
    the sum once the phase is DONE, `survivors` the silos in it, `aborted` the silos that gave up and
    why, `liars` those that sent false shares.
    """

    def __init__(
        self,
        session: Session,
        plan: SecAggParameters,
        directory: Mapping[str, bytes],
        workspace: Ring | None = None,
    ) -> None:
        if len(directory) > plan.capacity and not plan.group_size:
            raise PrivacyError(f"{len(directory)} silos invited where the ring has room for {plan.capacity}")
        self.session = session
        self.plan = plan
        self.phase = ServerPhase.ADVERTISE
        self.aborted: dict[str, str] = {}
        self.liars: frozenset[str] = frozenset()
        self._directory = dict(directory)
        self._verify = {name: verifier(key, name) for name, key in directory.items()}
        self._expected = frozenset(directory)
        self._answers: dict[str, Envelope] = {}
        self._binding = session.digest()
        self._cohort: Cohort | None = None
        self._adverts: tuple[Advert, ...] = ()
        self._shares: dict[int, Shares] = {}
        self._revealed: dict[int, dict[int, bytes]] = {}
        self._agreed = b""
        self._members: frozenset[int] = frozenset()
        self._survivors: frozenset[int] = frozenset()
        self._sum = self._checked(workspace)

    @classmethod
    def of_group(
        cls, whole: SecAggServer, group: Cohort, places: tuple[int, ...], workspace: Ring | None
    ) -> SecAggServer:
        """The coordinator of one of the groups that `whole` has drawn: it goes on from SHARES."""
        directory = dict(zip(group.names, group.identities, strict=True))
        server = cls(whole.session, group.parameters, directory, workspace)
        server._cohort, server._adverts = group, tuple(whole._adverts[place] for place in places)
        server._open(ServerPhase.SHARES, group.names, group.binding)
        return server

    def _checked(self, workspace: Ring | None) -> Ring:
        wanted = (self.session.length,), ring_dtype(self.plan.ring_bits)
        if workspace is None:
            return np.zeros(*wanted)
        if (workspace.shape, workspace.dtype) != wanted:
            raise PrivacyError(
                f"the workspace is {workspace.dtype}{workspace.shape}, not {wanted[1]}{wanted[0]}"
            )
        return workspace

    @property
    def missing(self) -> frozenset[str]:
        """The silos whose answer in this phase is still awaited."""
        return self._expected - self._answers.keys() - self.aborted.keys()

    @property
    def cohort(self) -> Cohort:
        if self._cohort is None:
            raise ProtocolError("the cohort is not known before the advertisements are closed")
        return self._cohort

    @property
    def survivors(self) -> tuple[str, ...]:
        """The silos whose vectors are in the sum, once that is settled."""
        return tuple(self.cohort.names[index] for index in sorted(self._survivors))

    @property
    def total(self) -> Ring:
        """The sum over the survivors, modulo the ring, as (length,) unsigned integers."""
        if self.phase is not ServerPhase.DONE:
            raise ProtocolError(f"there is no sum in phase {self.phase.name}")
        return self._sum

    def receive(self, message: bytes) -> str:
        """Take one message and return its silo's name; ProtocolError, and no change, where it is refused.

        A message that was taken already may come again, and changes nothing.
        """
        envelope = self._authenticated(message)
        if envelope.kind is Kind.ABORT:
            if envelope.binding != self.session.digest():
                raise ProtocolError(f"ABORT from {envelope.sender} belongs to another round or attempt")
            self.aborted[envelope.sender] = reason_from_bytes(envelope.payload)
            return envelope.sender
        if envelope.kind is Kind.MASKED:
            raise ProtocolError("a masked vector comes with its header: use fold")
        self._admit(envelope)
        return envelope.sender

    def lose(self, client: str, reason: str) -> bool:
        """The silo will not answer any more; False where that was known."""
        if client not in self._directory or client in self.aborted:
            return False
        self.aborted[client] = reason
        return True

    def announced(self, message: bytes) -> tuple[str, str]:
        """The silo, and the BLAKE3 digest in hexadecimal, of the upload that a MASKED header announces."""
        envelope = self._announcement(message)
        return envelope.sender, envelope.payload.hex()

    def fold(self, message: bytes, body: Body) -> str:
        """Add a complete masked vector to the sum: its signed header, and its bytes (or a memory map).

        Nothing is added unless the bytes are exactly those that the silo signed for, and nothing twice.
        """
        envelope = self._announcement(message)
        if self._answers.get(envelope.sender) != envelope:
            data = np.frombuffer(body, dtype=np.uint8).data
            if blake3.blake3(data).digest() != envelope.payload:
                raise ProtocolError(f"the vector of {envelope.sender} is not the one that it signed for")
            self._add([envelope], data)
        return envelope.sender

    def fold_sum(self, messages: Sequence[bytes], body: Body) -> None:
        """Add what somebody else has added up: the signed headers of its vectors, and its bytes.

        Who is in it is proven, that it is their sum is not. All of them are in or none; nothing twice.
        """
        envelopes = [self._announcement(message) for message in messages]
        fresh = [each for each in envelopes if self._answers.get(each.sender) != each]
        if (len(fresh) != len({each.sender for each in envelopes}) and fresh) or not envelopes:
            raise ProtocolError("a sum counts a masked vector that is counted already, or none")
        if fresh:
            self._add(fresh, np.frombuffer(body, dtype=np.uint8).data)

    @property
    def ready(self) -> bool:
        """Whether the phase can be closed with success before its deadline."""
        if not self.missing:
            return True
        return self.phase is ServerPhase.UNMASK and self._recoverable()

    def advance(self) -> dict[str, bytes]:
        """Close the phase; return the next message for each silo that is still in (none at the end)."""
        close: dict[ServerPhase, Callable[[], dict[str, bytes]]] = {
            ServerPhase.ADVERTISE: self._close_adverts,
            ServerPhase.REVEAL: self._close_reveals,
            ServerPhase.SHARES: self._close_shares,
            ServerPhase.MASKED: self._close_masked,
            ServerPhase.CONSENT: self._close_consents,
            ServerPhase.UNMASK: self._close_unmask,
        }
        if self.phase not in close:
            raise ProtocolError(f"the attempt is over: {self.phase.value}")
        for name in self.aborted:
            if self.phase is not ServerPhase.MASKED:
                self._answers.pop(name, None)
        try:
            return close[self.phase]()
        except (ProtocolError, PrivacyError):
            self.phase = ServerPhase.FAILED
            raise

    def _close_adverts(self) -> dict[str, bytes]:
        names = sorted(self._answers)
        parameters = self._parameters_for(len(names)).to_bytes()
        peers = tuple(
            Peer(name, self._answers[name].payload, self._answers[name].signature) for name in names
        )
        self._adverts = tuple(Advert.from_bytes(peer.advert) for peer in peers)
        identities = tuple(self._directory[name] for name in names)
        triples = [(peer.name, self._directory[peer.name], peer.advert) for peer in peers]
        sid = session_id(self.session, parameters, triples)
        self._cohort = Cohort(
            self.session, SecAggParameters.from_bytes(parameters), tuple(names), identities, sid, b""
        )
        message = seal(Kind.PEERS, self._binding, Peers(parameters, peers).to_bytes())
        if self._cohort.parameters.full_graph and not self.plan.group_size:
            self._open(ServerPhase.SHARES, names, self._cohort.binding)
        else:
            self._open(ServerPhase.REVEAL, names, sid)
        return dict.fromkeys(names, message)

    def _parameters_for(self, count: int) -> SecAggParameters:
        """Of a cohort of so many silos; with groups they depend on the group, and each silo computes them."""
        if not self.plan.group_size:
            return self.plan.with_cohort(count)
        if count < self.plan.group_size:
            raise ProtocolError(f"{count} silos came, and groups take {self.plan.group_size} each")
        return self.plan

    def _close_reveals(self) -> dict[str, bytes]:
        cohort = self.cohort
        silent = [name for name in cohort.names if name not in self._answers]
        if silent:
            # Going on without them would let the coordinator pick among the possible orders.
            raise ProtocolError(f"{silent[0]} advertised but did not open its nonce; start again without it")
        nonces = [self._answers[name].payload for name in cohort.names]
        self._cohort = cohort.with_beacon(combine_beacon(nonces))
        message = seal(Kind.BEACON, cohort.sid, b"".join(nonces))
        self._open(ServerPhase.SHARES, cohort.names, self._cohort.binding)
        return dict.fromkeys(cohort.names, message)

    def _close_shares(self) -> dict[str, bytes]:
        cohort, n = self.cohort, len(self.cohort.names)
        self._members = self._answered("shared its secrets")
        boxes: dict[int, dict[int, bytes]] = {}
        for index in self._members:
            boxes[index] = dict(zip(cohort.graph.neighbours(index), self._shares[index].boxes, strict=True))
        messages = {}
        for index in sorted(self._members):
            senders = [peer for peer in cohort.graph.neighbours(index) if peer in self._members]
            inbox = Inbox(self._members, tuple(boxes[peer][index] for peer in senders))
            messages[cohort.names[index]] = seal(Kind.INBOX, cohort.binding, inbox.to_bytes(n))
        self._open(ServerPhase.MASKED, messages, cohort.masked_among(self._members))
        self._sum[:] = 0
        return messages

    def _close_masked(self) -> dict[str, bytes]:
        cohort = self.cohort
        reduce_ring(self._sum, self.plan.ring_bits)
        self._survivors = self._answered("submitted its vector")
        self._agreed = cohort.consent_payload(self._members, self._survivors)
        uploads = {cohort.places[name]: upload for name, upload in self._answers.items()}
        messages = {}
        for name in (name for name in self.survivors if name not in self.aborted):
            seen = cohort.attested(cohort.places[name], self._survivors)
            announced = tuple((uploads[peer].payload, uploads[peer].signature) for peer in seen)
            alive = Survivors(self._survivors, announced).to_bytes(len(cohort.names))
            messages[name] = seal(Kind.ALIVE, cohort.binding, alive)
        self._open(ServerPhase.CONSENT, messages, cohort.binding)
        return messages

    def _close_consents(self) -> dict[str, bytes]:
        cohort = self.cohort
        needed = max(cohort.parameters.consents, cohort.parameters.t)
        if len(self._answers) < needed:
            raise ProtocolError(f"{len(self._answers)} silos confirmed the survivor set, {needed} must")
        signed = [(cohort.places[name], self._answers[name].signature) for name in sorted(self._answers)]
        evidence = Evidence(tuple(signed[: cohort.parameters.consents]))
        message = seal(Kind.EVIDENCE, cohort.binding, evidence.to_bytes())
        names = sorted(self._answers)
        self._open(ServerPhase.UNMASK, names, cohort.binding)
        return dict.fromkeys(names, message)

    def _close_unmask(self) -> dict[str, bytes]:
        cohort = self.cohort
        here = {cohort.places[name] for name in self._answers}
        reconstruction = Reconstruction(cohort, {index: self._revealed[index] for index in here})
        commitments = {index: shares.commitment for index, shares in self._shares.items()}
        masks = remaining_masks(
            cohort, self._adverts, commitments, self._survivors, self._members, reconstruction
        )
        unmask(self._sum, masks, self.plan.ring_bits)
        self.liars = frozenset(cohort.names[index] for index in reconstruction.liars)
        self.phase = ServerPhase.DONE
        return {}

    def _recoverable(self) -> bool:
        here = {self.cohort.places[name] for name in self._answers}
        threshold = self.cohort.parameters.t
        return all(len(here & set(self.cohort.graph.holders(owner))) >= threshold for owner in self._members)

    def _answered(self, what: str) -> frozenset[int]:
        """The indices of the silos that answered in this phase, if they are enough to go on."""
        cohort = self.cohort
        needed = cohort.parameters.least
        if len(self._answers) < needed:
            raise ProtocolError(
                f"{len(self._answers)} of {len(cohort.names)} silos {what}; {needed} are needed"
            )
        return frozenset(cohort.places[name] for name in self._answers)

    def _open(
        self, phase: ServerPhase, expected: Mapping[str, bytes] | list[str] | tuple[str, ...], binding: bytes
    ) -> None:
        self.phase, self._binding = phase, binding
        self._expected, self._answers = frozenset(expected), {}

    def _authenticated(self, message: bytes) -> Envelope:
        envelope = unseal(message)
        if envelope.sender not in self._verify:
            raise ProtocolError(f"{envelope.sender or 'an unnamed sender'} is not a silo of this job")
        envelope.check(self._verify[envelope.sender])
        return envelope

    def _announcement(self, message: bytes) -> Envelope:
        envelope = self._authenticated(message)
        if envelope.kind is not Kind.MASKED:
            raise ProtocolError(f"{envelope.kind.name} from {envelope.sender} announces no upload")
        exactly(envelope.payload, DIGEST_BYTES, "a digest")
        return envelope

    def _add(self, envelopes: Sequence[Envelope], data: memoryview) -> None:
        for envelope in envelopes:
            self._check(envelope)
        add_wire(self._sum, data, self.plan.ring_bits)
        self._answers |= {each.sender: each for each in envelopes}

    def _admit(self, envelope: Envelope) -> None:
        """Keep an answer if it is the one that is awaited; its payload is read here, once, to be sure."""
        self._check(envelope)
        self._read_payload(envelope)
        self._answers[envelope.sender] = envelope

    def _check(self, envelope: Envelope) -> None:
        name = envelope.sender
        if envelope.kind is not self.phase.value:
            raise ProtocolError(
                f"{envelope.kind.name} from {name} does not belong in phase {self.phase.name}"
            )
        if envelope.binding != self._binding:
            raise ProtocolError(
                f"{envelope.kind.name} from {name} belongs to another round, attempt or cohort"
            )
        if name not in self._expected or name in self.aborted:
            raise ProtocolError(f"{name} dropped out of this attempt; it can join the next")
        if name in self._answers and self._answers[name] != envelope:
            raise ProtocolError(f"{name} answered twice in phase {self.phase.name}; the first answer counts")

    def _read_payload(self, envelope: Envelope) -> None:
        payload = envelope.payload
        if envelope.kind is Kind.ADVERTISE:
            Advert.from_bytes(payload)
            return
        cohort = self.cohort
        index = cohort.places[envelope.sender]
        if envelope.kind is Kind.REVEAL:
            exactly(payload, NONCE_BYTES, "a nonce")
            if commit(payload, envelope.sender) != self._adverts[index].commitment:
                raise ProtocolError(f"the nonce opened by {envelope.sender} is not the one it committed to")
        elif envelope.kind is Kind.SHARES:
            self._shares[index] = Shares.from_bytes(payload, len(cohort.graph.neighbours(index)))
        elif envelope.kind is Kind.CONSENT:
            if payload != self._agreed:
                raise ProtocolError(f"{envelope.sender} signed another survivor set than it was told")
        elif envelope.kind is Kind.UNMASK:
            owners = cohort.peers_held_by(index, self._members)
            self._revealed[index] = dict(zip(owners, unmask_from_bytes(payload, len(owners)), strict=True))
