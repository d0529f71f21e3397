"""Keys, identities and what binds them to one attempt.

Every attempt has fresh X25519 keys: one pair to encrypt shares, one to agree on masks. They are
signed by the silo's enrolled Ed25519 identity, and everything derived from them is bound to the
session identifier, a hash of the job, the round, the attempt, the parameters and the sorted cohort
with its identity keys and advertised keys. Two silos that were told different things therefore
derive different keys, and nothing that one of them says is accepted by the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from roundtable.core.errors import IdentityError, ProtocolError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAXIMUM_LENGTH = 1 << 33
"""Ring elements in a vector: a keystream ends after 64 GiB."""
BOX_BYTES = 2 * KEY_BYTES + 16
"""A sealed pair of shares: one of the mask key, one of the self-mask seed, and the tag."""


class Signer(Protocol):
    """A silo's enrolled identity: signs with Ed25519. A key in a file or in a hardware module alike."""

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True)
class Session:
    """Which attempt this is, how many ring elements every silo submits, and what they follow from.

    `subject`, of 32 bytes where there is one, is a digest of all that silos have been told to train by: those
    that were told different things hold each other's messages for those of another attempt.
    """

    job: str
    round: int
    attempt: int
    length: int
    subject: bytes = b""

    def __post_init__(self) -> None:
        if len(self.subject) not in (0, KEY_BYTES):
            raise ProtocolError(f"the subject of a session has {KEY_BYTES} bytes, not {len(self.subject)}")
        if self.length > MAXIMUM_LENGTH:
            raise ProtocolError(f"a vector of {self.length} elements is longer than a mask: {MAXIMUM_LENGTH}")

    def digest(self) -> bytes:
        """What advertisements are bound to, before the cohort is known."""
        job = self.job.encode()
        fixed = struct.pack("<IQQQ", len(job), self.round, self.attempt, self.length)
        return hashlib.sha256(b"roundtable secagg session\0" + fixed + job + self.subject).digest()


def session_id(session: Session, parameters: bytes, cohort: list[tuple[str, bytes, bytes]]) -> bytes:
    """The identifier of an attempt from its sorted `(name, identity key, advertised payload)` triples."""
    digest = hashlib.sha256(b"roundtable secagg cohort\0" + session.digest() + parameters)
    for name, identity, advertised in cohort:
        raw = name.encode()
        digest.update(struct.pack("<HHH", len(raw), len(identity), len(advertised)))
        digest.update(raw + identity + advertised)
    return digest.digest()


def with_beacon(sid: bytes, beacon: bytes) -> bytes:
    """The binding of everything after the beacon (empty on the full graph)."""
    return hashlib.sha256(b"roundtable secagg binding\0" + sid + beacon).digest()


def verifier(identity: bytes, name: str) -> Callable[[bytes, bytes], bool]:
    """`verify(signature, message)` for a silo's pinned 32-byte Ed25519 key."""
    try:
        key = Ed25519PublicKey.from_public_bytes(identity)
    except ValueError as error:
        raise IdentityError(f"the identity key enrolled for {name} is not an Ed25519 key: {error}") from error

    def verify(signature: bytes, message: bytes) -> bool:
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return verify


class KeyPair:
    """A fresh X25519 pair whose private half can be shared, used and then erased."""

    def __init__(self, private: bytes | None = None) -> None:
        key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self._key: X25519PrivateKey | None = key
        self.public = key.public_key().public_bytes_raw()

    def private_bytes(self) -> bytearray:
        return bytearray(self._held().private_bytes_raw())

    def agree(self, public: bytes, peer: str) -> bytes:
        """The shared secret with a peer's public key; ProtocolError for keys of low order."""
        try:
            return self._held().exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise ProtocolError(f"the key advertised by {peer} is unusable: {error}") from error

    def erase(self) -> None:
        """Let go of the private key; the library clears it when it is freed."""
        self._key = None

    def _held(self) -> X25519PrivateKey:
        if self._key is None:
            raise ProtocolError("the keys of this attempt were erased; start a new attempt with fresh keys")
        return self._key


def mask_key(shared: bytes, binding: bytes, one: int, other: int) -> bytes:
    """The key of the mask that two silos, named by their index, share."""
    low, high = min(one, other), max(one, other)
    return _hkdf(shared, binding, b"mask" + struct.pack("<HH", low, high))


def self_mask_key(seed: bytes, binding: bytes, owner: int) -> bytes:
    """The key of the mask that a silo lays over its own vector."""
    return _hkdf(seed, binding, b"self" + struct.pack("<H", owner))


def seed_commitment(seed: bytes, binding: bytes, owner: int) -> bytes:
    """A commitment to a self-mask seed, by which the coordinator notices false shares of it."""
    return _hkdf(seed, binding, b"commit" + struct.pack("<H", owner))


class ShareBox:
    """Seals shares between two silos: AES-256-GCM under a key for one direction of one attempt.

    The key is used for a single message, so the nonce is fixed. The associated data names the
    attempt (through the binding), the phase, the sender and the receiver.
    """

    def __init__(self, shared: bytes, binding: bytes, sender: int, receiver: int) -> None:
        self._data = b"shares" + struct.pack("<HH", sender, receiver) + binding
        self._cipher = AESGCM(_hkdf(shared, binding, b"box" + struct.pack("<HH", sender, receiver)))

    def seal(self, shares: bytes) -> bytes:
        return self._cipher.encrypt(bytes(12), shares, self._data)

    def open(self, box: bytes, sender: str) -> bytes:
        try:
            return self._cipher.decrypt(bytes(12), box, self._data)
        except InvalidTag as error:
            raise ProtocolError(
                f"the shares from {sender} were altered, or made for another attempt or receiver"
            ) from error


def _hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


class Ed25519Signer:
    """A `Signer` over a key in memory."""

    def __init__(self, key: Ed25519PrivateKey | None = None) -> None:
        self._key = Ed25519PrivateKey.generate() if key is None else key
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)
