"""The framing of every message: a fixed header, a payload of checked length, and the silo's signature.

`magic ‖ version ‖ type ‖ binding (32) ‖ sender ‖ payload ‖ signature (64, from silos only)`. The
signature covers the type, the binding (session or attempt), the sender and a hash of the payload.
Every length is checked before anything is read, and nothing may be left over.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.keys import SIGNATURE_BYTES, Signer

MAGIC = b"RTSA"
VERSION = 1
MAXIMUM_MESSAGE = 1 << 26
MAXIMUM_NAME = 255
_HEADER = struct.Struct("<4sBB32sBI")


class Kind(IntEnum):
    """The messages of the protocol, in the order in which they flow."""

    ADVERTISE = 1
    PEERS = 2
    REVEAL = 3
    BEACON = 4
    SHARES = 5
    INBOX = 6
    MASKED = 7
    ALIVE = 8
    CONSENT = 9
    EVIDENCE = 10
    UNMASK = 11
    ABORT = 12
    SNAPSHOT = 13


@dataclass(frozen=True)
class Envelope:
    """A message whose framing is sound; whether it is true is for the receiver to find out."""

    kind: Kind
    binding: bytes
    sender: str
    payload: bytes
    signature: bytes

    def check(self, verify: Callable[[bytes, bytes], bool]) -> None:
        """ProtocolError unless the sender's identity signed exactly this."""
        if not verify(self.signature, signed_bytes(self.kind, self.binding, self.sender, self.payload)):
            raise ProtocolError(
                f"{self.kind.name} in the name of {self.sender} is not signed by its enrolled key"
            )


def signed_bytes(kind: Kind, binding: bytes, sender: str, payload: bytes) -> bytes:
    """What a silo signs: 32 bytes of hash for everything that the message says and where it belongs."""
    digest = hashlib.sha256(b"roundtable secagg message\0" + bytes([VERSION, kind]) + binding)
    digest.update(hashlib.sha256(sender.encode()).digest())
    digest.update(hashlib.sha256(payload).digest())
    return digest.digest()


def seal(kind: Kind, binding: bytes, payload: bytes, sender: str = "", signer: Signer | None = None) -> bytes:
    """Frame a message; a silo gives its name and signer, the coordinator neither."""
    name = sender.encode()
    header = _HEADER.pack(MAGIC, VERSION, kind, binding, len(name), len(payload))
    signature = b"" if signer is None else signer.sign(signed_bytes(kind, binding, sender, payload))
    return header + name + payload + signature


def unseal(message: bytes) -> Envelope:
    """Read the framing of a message; ProtocolError for anything malformed."""
    if not _HEADER.size <= len(message) <= MAXIMUM_MESSAGE:
        raise ProtocolError(f"a message of {len(message)} bytes cannot be one of this protocol")
    magic, version, kind, binding, name_length, length = _HEADER.unpack_from(message)
    if magic != MAGIC or version != VERSION or kind not in Kind._value2member_map_:
        raise ProtocolError(
            f"not a secure-aggregation message of version {VERSION}: {bytes(message[:6]).hex()}"
        )
    reader = Reader(bytes(message[_HEADER.size :]))
    sender = reader.text(name_length)
    payload = reader.take(length)
    signature = reader.take(SIGNATURE_BYTES) if name_length else b""
    reader.end()
    return Envelope(Kind(kind), binding, sender, payload, signature)


class Reader:
    """Reads fields off bytes, never past their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ProtocolError(f"a message ends {count - self.left} bytes too early")
        self._at += count
        return self._data[self._at - count : self._at]

    @property
    def left(self) -> int:
        """The bytes not read yet."""
        return len(self._data) - self._at

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, length: int) -> str:
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a name is not UTF-8: {raw[:40]!r}") from error

    def pieces(self, count: int, size: int) -> tuple[bytes, ...]:
        raw = self.take(count * size)
        return tuple(raw[start : start + size] for start in range(0, len(raw), size))

    def end(self) -> None:
        if self.left:
            raise ProtocolError(f"a message has {self.left} bytes too many")
