"""The silo's side of one attempt: a state machine without I/O, from fresh keys to erased ones.

    advertise()               → ADVERTISE    fresh keys, signed
    handle(PEERS)             → REVEAL       sparse graph, groups: opens the nonce for the now fixed cohort
                              → SHARES       full graph: straight on
    handle(BEACON)            → SHARES       shares of both secrets, sealed for each holder
    handle(INBOX)             → None         the others' shares are here: mask now
    masked_chunks(source)     → the masked vector, piece by piece; own keys are erased behind the last
    masked()                  → MASKED       the signed digest of those pieces
    handle(ALIVE)             → CONSENT      a signature over the survivor set, for one set only
    handle(EVIDENCE)          → UNMASK       one share of one kind for each peer; everything is erased

A message that is refused raises ProtocolError and changes nothing; send `abort(reason)` and start
again in a new attempt, with a new object and so with fresh keys. Deadlines are the caller's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum

import blake3

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg import keys, shamir
from roundtable.privacy.secagg.cohort import assemble
from roundtable.privacy.secagg.custody import Cohort, Custody
from roundtable.privacy.secagg.framing import Envelope, Kind, seal, unseal
from roundtable.privacy.secagg.graph import NONCE_BYTES, combine_beacon, commit
from roundtable.privacy.secagg.groups import split
from roundtable.privacy.secagg.masks import MaskSum, VectorSource, pack, piece_length, reduce_ring, ring_dtype
from roundtable.privacy.secagg.parameters import MINIMUM_COHORT, SecAggParameters
from roundtable.privacy.secagg.payloads import (
    MAXIMUM_REASON,
    Advert,
    Evidence,
    Inbox,
    Peers,
    Shares,
    Survivors,
    check_name,
    nonces_from_bytes,
)
from roundtable.privacy.secagg.releases import Releases
from roundtable.privacy.secagg.snapshot import from_snapshot, to_snapshot


class ClientPhase(Enum):
    """Where a silo is; the value says what it waits for."""

    NEW = "to advertise"
    ADVERTISED = "the cohort"
    REVEALED = "the beacon"
    SHARED = "the others' shares"
    READY = "its own vector"
    MASKING = "the end of its own vector"
    COMMITTED = "the survivor set"
    CONSENTED = "the evidence"
    DONE = "nothing: shares revealed, keys erased"
    ABORTED = "nothing: aborted, keys erased"


class SecAggClient:
    """One silo in one attempt.

    `plan` is what the silo itself computes from the job with `choose_parameters`; anything weaker is
    refused. `directory` maps silo names to the Ed25519 keys that this silo has pinned, itself
    included. `releases` remembers durably what sums the silo took part in. `minimum_cohort` is
    the site's own demand: where the cohort is split into groups, of each group. `nonce` is given by
    simulations alone, which draw the same groups again.
    """

    def __init__(
        self,
        session: keys.Session,
        plan: SecAggParameters,
        name: str,
        signer: keys.Signer,
        directory: Mapping[str, bytes],
        releases: Releases,
        minimum_cohort: int = MINIMUM_COHORT,
        nonce: bytes = b"",
    ) -> None:
        self.session = session
        self.plan = plan
        self.name = check_name(name)
        self.minimum_cohort = minimum_cohort
        self.phase = ClientPhase.NEW
        self._signer = signer
        self._directory = directory
        self._releases = releases
        self._box_keys = keys.KeyPair()
        self._mask_keys = keys.KeyPair()
        self._seed = bytearray(os.urandom(keys.KEY_BYTES))
        self._nonce = nonce or os.urandom(NONCE_BYTES)
        self._cohort: Cohort | None = None
        self._adverts: tuple[Advert, ...] = ()
        self._index = -1
        self._own_pair = b""
        self._custody: Custody | None = None
        self._last: tuple[bytes | None, bytes | None] = None, None

    @property
    def cohort(self) -> Cohort:
        """The silos of this attempt; known from PEERS on. After BEACON: those of the silo's own group."""
        if self._cohort is None:
            raise ProtocolError(f"{self.name} does not know its cohort yet")
        return self._cohort

    def advertise(self) -> bytes:
        """The signed public keys with which the silo joins."""
        self._expect(ClientPhase.NEW)
        self.phase = ClientPhase.ADVERTISED
        return self._seal(Kind.ADVERTISE, self.session.digest(), self._advert().to_bytes())

    def handle(self, message: bytes) -> bytes | None:
        """Take the coordinator's next message and return the answer to it, if it has one.

        The last message may come again, after a lost answer: it gets the same bytes.
        """
        if message == self._last[0]:
            return self._last[1]
        envelope = unseal(message)
        step = {
            Kind.PEERS: self._on_peers,
            Kind.BEACON: self._on_beacon,
            Kind.INBOX: self._on_inbox,
            Kind.ALIVE: self._on_alive,
            Kind.EVIDENCE: self._on_evidence,
        }.get(envelope.kind)
        if step is None or envelope.sender:
            raise ProtocolError(f"{envelope.kind.name} is not a message for a silo")
        self._last = bytes(message), step(envelope)
        return self._last[1]

    def _on_peers(self, envelope: Envelope) -> bytes:
        self._expect(ClientPhase.ADVERTISED)
        self._bound_to(envelope, self.session.digest())
        offered = Peers.from_bytes(envelope.payload)
        cohort, adverts = assemble(self.session, offered, self._directory, self.plan, self.minimum_cohort)
        if self.name not in cohort.names:
            raise ProtocolError(f"the cohort that was announced to {self.name} lacks it")
        index = cohort.names.index(self.name)
        if adverts[index] != self._advert():
            raise ProtocolError(f"the coordinator announces other keys for {self.name} than it advertised")
        self._cohort, self._adverts, self._index = cohort, adverts, index
        if cohort.parameters.full_graph and not cohort.parameters.group_size:
            return self._share()
        self.phase = ClientPhase.REVEALED
        return self._seal(Kind.REVEAL, cohort.sid, self._nonce)

    def _on_beacon(self, envelope: Envelope) -> bytes:
        self._expect(ClientPhase.REVEALED)
        self._bound_to(envelope, self.cohort.sid)
        nonces = nonces_from_bytes(envelope.payload, len(self._adverts))
        for name, nonce, advert in zip(self.cohort.names, nonces, self._adverts, strict=True):
            if commit(nonce, name) != advert.commitment:
                raise ProtocolError(f"the nonce opened for {name} is not the one it committed to")
        whole = self.cohort.with_beacon(combine_beacon(nonces))
        if whole.parameters.group_size:
            whole = self._join_group(whole)
        self._cohort = whole
        return self._share()

    def _join_group(self, whole: Cohort) -> Cohort:
        """From here on the silo's cohort is its own group, drawn by the beacon."""
        group, places = next(pair for pair in split(whole) if self._index in pair[1])
        self._adverts = tuple(self._adverts[place] for place in places)
        self._index = places.index(self._index)
        return group

    def _share(self) -> bytes:
        """Split the mask key and the self-mask seed among the holders."""
        cohort, me = self.cohort, self._index
        holders = cohort.graph.holders(me)
        secrets = self._mask_keys.private_bytes() + self._seed
        pairs = shamir.share(secrets, cohort.parameters.t, [holder + 1 for holder in holders])
        secrets[:] = bytes(len(secrets))
        boxes = []
        for holder, pair in zip(holders, pairs, strict=True):
            if holder == me:
                self._own_pair = pair
            else:
                boxes.append(self._box(me, holder).seal(pair))
        commitment = keys.seed_commitment(bytes(self._seed), cohort.binding, me)
        self.phase = ClientPhase.SHARED
        return self._seal(Kind.SHARES, cohort.binding, Shares(commitment, tuple(boxes)).to_bytes())

    def _on_inbox(self, envelope: Envelope) -> None:
        self._expect(ClientPhase.SHARED)
        cohort, me = self.cohort, self._index
        self._bound_to(envelope, cohort.binding)
        inbox = Inbox.from_bytes(envelope.payload, len(cohort.names))
        parameters = cohort.parameters
        needed = max(parameters.least, self.minimum_cohort)
        if me not in inbox.members or len(inbox.members) < needed:
            raise ProtocolError(
                f"{len(inbox.members)} silos shared their secrets; {needed} are needed, this one among them"
            )
        senders = cohort.peers_held_by(me, inbox.members)
        others = [peer for peer in senders if peer != me]
        if len(others) != len(inbox.boxes) or len(senders) < parameters.t:
            raise ProtocolError(
                f"{len(inbox.boxes)} shares for this silo where {len(others)} silos hold it as a neighbour "
                f"and {parameters.t} are needed"
            )
        boxes = iter(inbox.boxes)
        held = bytearray()
        for peer in senders:
            held += self._own_pair if peer == me else self._open(peer, next(boxes))
        self._custody = Custody(cohort, me, inbox.members, self.minimum_cohort, b"", held)
        self.phase = ClientPhase.READY

    def masked_chunks(self, source: VectorSource) -> Iterator[memoryview]:
        """Mask a vector of `session.length` ring elements and yield its wire bytes, piece by piece.

        Can be called once. Each piece must be used before the next is asked for. The silo's own keys
        are erased before the first piece is out; after the last, `snapshot()` and `masked()` work. A
        caller that stores the pieces before it sends any can resume after a restart; one that
        sends them as they come abandons the attempt if it is interrupted.
        """
        self._expect(ClientPhase.READY)
        if len(source) != self.session.length:
            raise ProtocolError(
                f"a vector of {len(source)} elements where the session says {self.session.length}"
            )
        self._releases.mask(self.cohort)
        self.phase = ClientPhase.MASKING
        masks = self._masks()
        self._forget_keys()
        return self._stream(source, masks)

    def _stream(self, source: VectorSource, masks: MaskSum) -> Iterator[memoryview]:
        assert self._custody is not None
        ring_bits = self.cohort.parameters.ring_bits
        dtype, step, digest = ring_dtype(ring_bits), piece_length(ring_bits), blake3.blake3()
        for start in range(0, len(source), step):
            piece = source.block(start, min(start + step, len(source))).astype(dtype, copy=False)
            masks.add_to(piece)
            reduce_ring(piece, ring_bits)
            chunk = pack(piece, ring_bits)
            digest.update(chunk)
            yield chunk
        masks.erase()
        self._custody.upload = digest.digest()
        self.phase = ClientPhase.COMMITTED

    def _masks(self) -> MaskSum:
        """The self mask and one mask for each neighbour: added towards higher, subtracted towards lower."""
        assert self._custody is not None
        cohort, me, members = self.cohort, self._index, self._custody.members
        plus = [keys.self_mask_key(bytes(self._seed), cohort.binding, me)]
        minus: list[bytes] = []
        for peer in cohort.graph.neighbours(me):
            if peer in members:
                shared = self._mask_keys.agree(self._adverts[peer].mask_key, cohort.names[peer])
                key = keys.mask_key(shared, cohort.binding, me, peer)
                (plus if me < peer else minus).append(key)
        return MaskSum(cohort.parameters.ring_bits, plus, minus)

    def masked(self) -> bytes:
        """The signed digest of the masked vector; goes with the upload, and can be repeated."""
        self._expect(ClientPhase.COMMITTED)
        custody = self._held()
        return self._seal(Kind.MASKED, self.cohort.masked_among(custody.members), custody.upload)

    def _on_alive(self, envelope: Envelope) -> bytes:
        self._expect(ClientPhase.COMMITTED, ClientPhase.CONSENTED)
        self._bound_to(envelope, self.cohort.binding)
        custody = self._held()
        payload = custody.agree(Survivors.from_bytes(envelope.payload, len(self.cohort.names)))
        if not self.cohort.parameters.full_graph:
            self._releases.unmask(self.cohort, custody.agreed)
        self.phase = ClientPhase.CONSENTED
        return self._seal(Kind.CONSENT, self.cohort.binding, payload)

    def _on_evidence(self, envelope: Envelope) -> bytes:
        self._expect(ClientPhase.CONSENTED)
        self._bound_to(envelope, self.cohort.binding)
        custody = self._held()
        payload = custody.reveal(Evidence.from_bytes(envelope.payload))
        self._releases.unmask(self.cohort, custody.agreed)
        custody.erase()
        self.phase = ClientPhase.DONE
        return self._seal(Kind.UNMASK, self.cohort.binding, payload)

    def snapshot(self) -> bytes:
        """What a restart needs to go on, from the masked vector to the unmasking; see `snapshot.py`.

        Store it (encrypted) before the upload starts and again before each answer from then on is sent.
        """
        self._expect(ClientPhase.COMMITTED, ClientPhase.CONSENTED)
        return to_snapshot(self._held())

    @classmethod
    def restore(cls, snapshot: bytes, signer: keys.Signer, releases: Releases) -> SecAggClient:
        """Go on from a snapshot. The vector cannot be masked again: resume the upload of stored bytes."""
        custody = from_snapshot(snapshot)
        cohort = custody.cohort
        name = cohort.names[custody.index]
        directory = dict(zip(cohort.names, cohort.identities, strict=True))
        client = cls(cohort.session, cohort.parameters, name, signer, directory, releases)
        client._forget_keys()
        client._cohort, client._index, client._custody = cohort, custody.index, custody
        client.phase = ClientPhase.COMMITTED if custody.survivors is None else ClientPhase.CONSENTED
        return client

    def abort(self, reason: str) -> bytes:
        """Erase everything and tell the coordinator why."""
        self._forget_keys()
        if self._custody is not None:
            self._custody.erase()
        self._last = None, None
        self.phase = ClientPhase.ABORTED
        return self._seal(Kind.ABORT, self.session.digest(), reason.encode()[:MAXIMUM_REASON])

    def _forget_keys(self) -> None:
        self._box_keys.erase()
        self._mask_keys.erase()
        self._seed[:] = bytes(len(self._seed))
        self._own_pair = b""

    def _advert(self) -> Advert:
        return Advert(self._box_keys.public, self._mask_keys.public, commit(self._nonce, self.name))

    def _box(self, sender: int, receiver: int) -> keys.ShareBox:
        peer = receiver if sender == self._index else sender
        shared = self._box_keys.agree(self._adverts[peer].box_key, self.cohort.names[peer])
        return keys.ShareBox(shared, self.cohort.binding, sender, receiver)

    def _open(self, peer: int, box: bytes) -> bytes:
        return self._box(peer, self._index).open(box, self.cohort.names[peer])

    def _held(self) -> Custody:
        assert self._custody is not None
        return self._custody

    def _seal(self, kind: Kind, binding: bytes, payload: bytes) -> bytes:
        return seal(kind, binding, payload, self.name, self._signer)

    def _bound_to(self, envelope: Envelope, binding: bytes) -> None:
        if envelope.binding != binding:
            raise ProtocolError(f"{envelope.kind.name} belongs to another round, attempt or cohort")

    def _expect(self, *phases: ClientPhase) -> None:
        if self.phase not in phases:
            raise ProtocolError(f"{self.name} cannot do this now: it waits for {self.phase.value}")
