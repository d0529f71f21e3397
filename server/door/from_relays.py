"""Decodes what relays say of themselves and of silos into checked, bounded values.

What a silo says through a relay passes `from_agents.py`, as if it had come by a connection of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roundtable.core import bounds
from roundtable.core.errors import ProtocolError
from roundtable.core.identity.signing import MOST_RELAYS
from roundtable.proto import MOST_TOGETHER, relay_pb2
from roundtable.proto.receipts import sum_values
from roundtable.server.door.agent_messages import JobStep, Passage, UploadOffer
from roundtable.server.door.from_agents import offer_of, passage_of, step_of

_SILO_CHARACTERS = 64
MOST_WITHIN = 1000
MOST_MEMBERS = 1000
"""Silos in one sum: what they have signed goes before its bytes, in one message."""


@dataclass(frozen=True)
class RelayIntroduction:
    """A relay's hello."""

    version: str
    protocol: int
    together: int


@dataclass(frozen=True)
class Bearer:
    """A silo that is away: its identity certificate (PEM), its installation's public key, its passage."""

    silo: str
    identity: bytes
    installation: bytes
    passage: Passage


@dataclass(frozen=True)
class RegionRound:
    """A round that stayed within a region: digests of the model that it began with and of the one that it
    `made`, and whose updates are in that: how many, of how many examples, the digest of the relay's list."""

    round: int
    model: str
    made: str
    silos: int
    examples: int
    members: str


@dataclass(frozen=True)
class SumOffer:
    """A sum that is offered: BLAKE3 digest and bytes, its members by name, `sums` of relays behind the one
    that offers it, with those, and what the relay has signed of it at `time`, but for its own name. With
    `ask` no bytes follow. `within`: the rounds within its region that have led to it."""

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
    sums: tuple[tuple[str, SumOffer], ...] = ()
    within: tuple[RegionRound, ...] = ()

    @cached_property
    def everyone(self) -> Mapping[str, UploadOffer]:
        """All silos whose updates are in it, by name."""
        found = dict(self.members)
        for _, below in self.sums:
            found |= below.everyone
        return dict(sorted(found.items()))

    @property
    def model(self) -> str:
        """The region's own model from which its members have trained; "" where that is the coordinator's."""
        return self.within[-1].made if self.within else ""


def relay_of(message: relay_pb2.FromRelay) -> RelayIntroduction | None:
    """Decodes the first message of a relay's stream; None for any other."""
    if message.WhichOneof("message") != "hello":
        return None
    hello = message.hello
    return RelayIntroduction(bounds.one_line(hello.version, 50), hello.protocol, hello.together)


def said_in(message: relay_pb2.FromRelay) -> Sequence[relay_pb2.FromRelay]:
    """The messages that came as one, itself where it came alone; ProtocolError for more than may."""
    if message.WhichOneof("message") != "several":
        return [message]
    bounds.within(len(message.several.messages), 0, MOST_TOGETHER, "the messages of a relay in one")
    return message.several.messages


def silo_of(name: str) -> str:
    """Decodes a silo's name; ProtocolError for what is none."""
    return bounds.word(bounds.text(name, _SILO_CHARACTERS, "a silo's name"), "a silo's name")


def relay_name(name: str) -> str:
    """Decodes a relay's name; ProtocolError for what is none."""
    return bounds.word(bounds.text(name, _SILO_CHARACTERS, "a relay's name"), "a relay's name")


def bearer_of(message: relay_pb2.Bearer) -> Bearer:
    """Decodes who has signed the updates that a relay holds."""
    return Bearer(
        silo_of(message.silo),
        bounds.bounded(message.identity, bounds.CERTIFICATE_BYTES, "a silo's identity certificate"),
        bounds.bounded(message.installation, bounds.SIGNATURE_BYTES, "an installation's key"),
        passage_of(message.passage),
    )


def sum_of(header: relay_pb2.SumHeader, depth: int = 1) -> SumOffer:
    """Decodes what goes before a sum's bytes; ProtocolError for anything that cannot be."""
    bounds.within(depth, 1, MOST_RELAYS, "the number of relays behind each other")
    at, content = step_of(header.step), header.content
    if not bounds.is_digest(content.digest):
        raise ProtocolError("the sum's digest is no BLAKE3 digest of 64 hexadecimal digits")
    bounds.within(len(header.sums), 0, MOST_MEMBERS, "the number of sums in a sum")
    below = tuple((relay_name(each.relay), sum_of(each.header, depth + 1)) for each in header.sums)
    count = len(header.members) + sum(len(each.everyone) for _, each in below)
    bounds.within(count, 1, MOST_MEMBERS, "the number of a sum's members")
    members: dict[str, UploadOffer] = {}
    for member in header.members:
        name, offer = silo_of(member.silo), offer_of(member.header)
        if offer.at != at:
            raise ProtocolError(f"the update of {name!r} is not of the sum's step")
        if members and name <= next(reversed(members)):
            raise ProtocolError("a sum's members are in the order of their names, each once")
        members[name] = offer
    made = SumOffer(
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
        sums=below,
        within=tuple(region_round_of(each) for each in header.within[: MOST_WITHIN + 1]),
    )
    bounds.within(len(made.within), 0, MOST_WITHIN, "the number of rounds within a region")
    if len(made.everyone) != count or any((each.at, each.size) != (at, made.size) for _, each in below):
        raise ProtocolError("a sum lies in another one of the same step and size, and nobody is in both")
    return made


def region_round_of(message: relay_pb2.RegionRound) -> RegionRound:
    """Decodes a round within a region; ProtocolError for what cannot be one."""
    return RegionRound(
        bounds.within(message.round, 1, bounds.MOST_ROUNDS, "a round"),
        bounds.digest(message.model, "a region's model"),
        bounds.digest(message.made, "a region's model"),
        bounds.within(message.silos, 0, MOST_MEMBERS, "the silos of a region's round"),
        bounds.within(message.examples, 0, bounds.MOST_BYTES, "the examples of a region's round"),
        bounds.digest(message.members, "the members of a region's round"),
    )
