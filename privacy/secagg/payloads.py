"""The payloads of the protocol's messages, each with its encoding and its bounded reading.

What a message should contain follows from the phase (how many silos, how many shares), so readers
are told the counts that they expect, and anything else is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.framing import MAXIMUM_NAME, Reader
from roundtable.privacy.secagg.graph import NONCE_BYTES
from roundtable.privacy.secagg.keys import BOX_BYTES, KEY_BYTES, SIGNATURE_BYTES
from roundtable.privacy.secagg.parameters import PARAMETERS_BYTES

ADVERT_BYTES = 3 * KEY_BYTES
DIGEST_BYTES = 32
MAXIMUM_REASON = 1000


@dataclass(frozen=True)
class Advert:
    """A silo's fresh public keys, and its commitment to a nonce for the beacon."""

    box_key: bytes
    mask_key: bytes
    commitment: bytes

    def to_bytes(self) -> bytes:
        return self.box_key + self.mask_key + self.commitment

    @classmethod
    def from_bytes(cls, data: bytes) -> Advert:
        reader = Reader(data)
        advert = cls(*reader.pieces(3, KEY_BYTES))
        reader.end()
        return advert


@dataclass(frozen=True)
class Peer:
    """A silo's advertisement as the coordinator passes it on, with the silo's own signature."""

    name: str
    advert: bytes
    signature: bytes


@dataclass(frozen=True)
class Peers:
    """The cohort, sorted by name, and the parameters that it will run with."""

    parameters: bytes
    peers: tuple[Peer, ...]

    def to_bytes(self) -> bytes:
        parts = [self.parameters, struct.pack("<H", len(self.peers))]
        for peer in self.peers:
            name = peer.name.encode()
            parts += [bytes([len(name)]), name, peer.advert, peer.signature]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Peers:
        reader = Reader(data)
        parameters = reader.take(PARAMETERS_BYTES)
        peers = []
        for _ in range(reader.number(2)):
            name = reader.text(reader.number(1))
            peers.append(Peer(name, reader.take(ADVERT_BYTES), reader.take(SIGNATURE_BYTES)))
        reader.end()
        return cls(parameters, tuple(peers))


@dataclass(frozen=True)
class Shares:
    """A commitment to the self-mask seed, and one sealed box for each holder but oneself, ascending."""

    commitment: bytes
    boxes: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        return self.commitment + b"".join(self.boxes)

    @classmethod
    def from_bytes(cls, data: bytes, boxes: int) -> Shares:
        reader = Reader(data)
        shares = cls(reader.take(KEY_BYTES), reader.pieces(boxes, BOX_BYTES))
        reader.end()
        return shares


@dataclass(frozen=True)
class Inbox:
    """Who shared its secrets, and the boxes that they sealed for the receiver, ascending."""

    members: frozenset[int]
    boxes: tuple[bytes, ...]

    def to_bytes(self, n: int) -> bytes:
        return members_to_bytes(self.members, n) + struct.pack("<H", len(self.boxes)) + b"".join(self.boxes)

    @classmethod
    def from_bytes(cls, data: bytes, n: int) -> Inbox:
        reader = Reader(data)
        members = members_from_bytes(reader.take(members_size(n)), n)
        inbox = cls(members, reader.pieces(reader.number(2), BOX_BYTES))
        reader.end()
        return inbox


@dataclass(frozen=True)
class Survivors:
    """Whose vectors are summed, and the signed announcements of the receiver's neighbours among them.

    On the sparse graph there is one for each of these, ascending: the upload's digest and the signature
    of MASKED, made for the members that its sender masked among. On the full graph there is none.
    """

    survivors: frozenset[int]
    announcements: tuple[tuple[bytes, bytes], ...] = ()

    def to_bytes(self, n: int) -> bytes:
        return members_to_bytes(self.survivors, n) + b"".join(map(b"".join, self.announcements))

    @classmethod
    def from_bytes(cls, data: bytes, n: int) -> Survivors:
        reader = Reader(data)
        survivors = members_from_bytes(reader.take(members_size(n)), n)
        found = []
        while reader.left:
            found.append((reader.take(DIGEST_BYTES), reader.take(SIGNATURE_BYTES)))
        return cls(survivors, tuple(found))


@dataclass(frozen=True)
class Evidence:
    """Signatures of survivors over the survivor set: what a silo demands before it reveals shares."""

    signatures: tuple[tuple[int, bytes], ...]

    def to_bytes(self) -> bytes:
        parts = [struct.pack("<H", len(self.signatures))]
        parts += [struct.pack("<H", index) + signature for index, signature in self.signatures]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Evidence:
        reader = Reader(data)
        count = reader.number(2)
        found = tuple((reader.number(2), reader.take(SIGNATURE_BYTES)) for _ in range(count))
        reader.end()
        return cls(found)


def nonces_from_bytes(data: bytes, n: int) -> tuple[bytes, ...]:
    """The opened nonces of all n silos."""
    reader = Reader(data)
    nonces = reader.pieces(n, NONCE_BYTES)
    reader.end()
    return nonces


def unmask_from_bytes(data: bytes, count: int) -> tuple[bytes, ...]:
    """One share for each peer whose shares the sender holds, ascending; the survivor set says which kind."""
    reader = Reader(data)
    shares = reader.pieces(count, KEY_BYTES)
    reader.end()
    return shares


def exactly(data: bytes, size: int, what: str) -> bytes:
    """A payload that is one field of a fixed size."""
    if len(data) != size:
        raise ProtocolError(f"{what} of {len(data)} bytes where {size} were expected")
    return data


def reason_from_bytes(data: bytes) -> str:
    """Why somebody aborted, for people: shortened, and harmless to print."""
    text = data[:MAXIMUM_REASON].decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text)


def members_size(n: int) -> int:
    return (n + 7) // 8


def members_to_bytes(members: frozenset[int], n: int) -> bytes:
    """A set of silo indices as a bitmap."""
    bits = np.zeros(n, dtype=np.uint8)
    bits[sorted(members)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def members_from_bytes(data: bytes, n: int) -> frozenset[int]:
    """Read a bitmap; its length is fixed by n and the bits behind the last silo must be zero."""
    bits = np.unpackbits(
        np.frombuffer(exactly(data, members_size(n), "a member set"), np.uint8), bitorder="little"
    )
    if bits[n:].any():
        raise ProtocolError(f"a member set names silos beyond the {n} of the cohort")
    return frozenset(np.flatnonzero(bits).tolist())


def check_name(name: str) -> str:
    """A silo's name as it may appear on the wire."""
    if not 1 <= len(name.encode()) <= MAXIMUM_NAME:
        raise ProtocolError(f"a silo's name must have 1 to {MAXIMUM_NAME} bytes: {name[:40]!r}")
    return name
