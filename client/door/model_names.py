"""Artifacts as the coordinator names them: models, and what makes one model of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundtable.core import bounds
from roundtable.core.model_delta import NAME_LENGTH
from roundtable.proto import agent_pb2, common_pb2
from roundtable.proto.receipts import region_values

_MOST_HOPS = 64


@dataclass(frozen=True)
class ArtifactName:
    """BLAKE3 digest (64 hexadecimal digits) and size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class ModelHop:
    """What makes one model of another: the first 32 digits of their digests, and the artifact that says
    how."""

    base: str
    model: str
    delta: ArtifactName


@dataclass(frozen=True)
class RegionOrigin:
    """A relay's word that a model is its region's: what it has signed at `time`, but for its own name."""

    statement: Mapping[str, Any]
    time: float
    signature: bytes


def region_of(instruction: agent_pb2.Instruction) -> RegionOrigin | None:
    """Whose model an instruction names, None for the coordinator's; ProtocolError for what cannot be."""
    if not instruction.HasField("region"):
        return None
    region = instruction.region
    bounds.digest(region.start, "the model that a region began with")
    bounds.digest(region.rounds, "the records of a region's rounds")
    time = bounds.within(region.time, 0.0, bounds.LATEST, "the time of a region's model")
    signature = bounds.bounded(region.signature, bounds.SIGNATURE_BYTES, "the signature of a region's model")
    statement = {name: value for name, value in region_values("", instruction).items() if name != "relay"}
    return RegionOrigin(statement, time, signature)


def hops_of(messages: Sequence[agent_pb2.Hop]) -> tuple[ModelHop, ...]:
    """The hops of an instruction; ProtocolError for names that are none, and for too many."""
    bounds.within(len(messages), 0, _MOST_HOPS, "the number of models in between")
    return tuple(ModelHop(_half(hop.base), _half(hop.model), artifact_of(hop.delta)) for hop in messages)


def _half(digest: str) -> str:
    """The first half of a model's digest."""
    return bounds.digest(digest + "0" * NAME_LENGTH, "half of a model's digest")[:NAME_LENGTH]


def artifact_of(message: common_pb2.Artifact) -> ArtifactName:
    """A model's name; ProtocolError for a digest or a size that is none."""
    size = bounds.within(message.size, 0, bounds.MOST_BYTES, "the bytes of a model")
    return ArtifactName(bounds.digest(message.digest, "a model"), size)
