"""Artifacts as the coordinator names them: models, and what makes one model of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundtable.core import bounds
from roundtable.core.model_delta import NAME_LENGTH
from roundtable.proto import agent_pb2, common_pb2

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
