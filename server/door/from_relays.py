"""Decodes what relays say of themselves and of silos into checked, bounded values.

What a silo says through a relay passes `from_agents.py`, as if it had come by a connection of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundtable.core import bounds
from roundtable.proto import relay_pb2
from roundtable.server.door.agent_messages import Passage
from roundtable.server.door.from_agents import passage_of

_SILO_CHARACTERS = 64


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
