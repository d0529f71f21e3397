"""Decodes what relays say of themselves and of silos into checked, bounded values.

What a silo says through a relay passes `from_agents.py`, as if it had come by a connection of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundtable.core import bounds
from roundtable.core.errors import ProtocolError
from roundtable.proto import relay_pb2
from roundtable.proto.receipts import sum_values
from roundtable.server.door.agent_messages import JobStep, Passage, UploadOffer
from roundtable.server.door.from_agents import offer_of, passage_of, step_of

_SILO_CHARACTERS = 64
MOST_MEMBERS = 1000
"""Silos in one sum: what they have signed goes before its bytes, in one message."""


@dataclass(frozen=True)
class RelayIntroduction:
    """A relay's hello."""

    version: str
    protocol: int


@dataclass(frozen=True)
class Bearer:
    """A silo that is away: its identity certificate (PEM), its installation's public key, its passage."""

    silo: str
    identity: bytes
    installation: bytes
    passage: Passage


@dataclass(frozen=True)
class SumOffer:
    """A sum that is offered: BLAKE3 digest and bytes, its members by name, and what the relay has signed of
    it at `time`, but for its own name. With `ask` no bytes follow."""

    at: JobStep
    digest: str
    size: int
    members: Mapping[str, UploadOffer]
    time: float
    signature: bytes
    certificate: bytes
    offset: int
    ask: bool
    statement: Mapping[str, Any]


def relay_of(message: relay_pb2.FromRelay) -> RelayIntroduction | None:
    """Decodes the first message of a relay's stream; None for any other."""
    if message.WhichOneof("message") != "hello":
        return None
    return RelayIntroduction(bounds.one_line(message.hello.version, 50), message.hello.protocol)


def silo_of(name: str) -> str:
    """Decodes a silo's name; ProtocolError for what is none."""
    return bounds.word(bounds.text(name, _SILO_CHARACTERS, "a silo's name"), "a silo's name")


def bearer_of(message: relay_pb2.Bearer) -> Bearer:
    """Decodes who has signed the updates that a relay holds."""
    return Bearer(
        silo_of(message.silo),
        bounds.bounded(message.identity, bounds.CERTIFICATE_BYTES, "a silo's identity certificate"),
        bounds.bounded(message.installation, bounds.SIGNATURE_BYTES, "an installation's key"),
        passage_of(message.passage),
    )


def sum_of(header: relay_pb2.SumHeader) -> SumOffer:
    """Decodes what goes before a sum's bytes; ProtocolError for anything that cannot be."""
    at, content = step_of(header.step), header.content
    if not bounds.is_digest(content.digest):
        raise ProtocolError("the sum's digest is no BLAKE3 digest of 64 hexadecimal digits")
    bounds.within(len(header.members), 1, MOST_MEMBERS, "the number of a sum's members")
    members: dict[str, UploadOffer] = {}
    for member in header.members:
        name, offer = silo_of(member.silo), offer_of(member.header)
        if offer.at != at:
            raise ProtocolError(f"the update of {name!r} is not of the sum's step")
        if members and name <= next(reversed(members)):
            raise ProtocolError("a sum's members are in the order of their names, each once")
        members[name] = offer
    return SumOffer(
        at=at,
        digest=content.digest,
        size=bounds.within(content.size, 1, bounds.MOST_BYTES, "a sum's bytes"),
        members=members,
        time=bounds.within(header.time, 0.0, bounds.LATEST, "a sum's time"),
        signature=bounds.bounded(header.signature, bounds.SIGNATURE_BYTES, "a sum's signature"),
        certificate=bounds.bounded(header.certificate, bounds.CERTIFICATE_BYTES, "a relay's certificate"),
        offset=bounds.within(header.offset, 0, bounds.MOST_BYTES, "a sum's offset"),
        ask=header.ask,
        statement={name: value for name, value in sum_values("", header).items() if name != "relay"},
    )
