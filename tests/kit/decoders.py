"""The decoders of what arrives over the wire, as parsers of bytes; each value that they give is looked at."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message
from strange_messages import fill

from roundtable.client.door import incoming
from roundtable.proto import administration_pb2, agent_pb2, common_pb2, operator_pb2
from roundtable.server.door import from_agents, from_operators

LARGEST = 1e100
_TEXTS_OF_OTHERS = ("config", "job_config")
"""Fields whose text is handed on unread, to a parser of its own."""


def values_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(field, value) of everything that is in a decoded value."""
    if is_dataclass(value):
        for each in fields(value):
            yield from values_of(getattr(value, each.name), each.name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"a key of {name}", key
            yield from values_of(inner, name)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from values_of(inner, name)
    else:
        yield name, value


def look(decoded: Any) -> None:
    """AssertionError for a message of protobuf, an unbounded number, or text that moves a cursor."""
    for name, value in values_of(decoded):
        if name.endswith("statement"):
            continue  # What a silo has signed, word for word: of a flawed one only the signature counts.
        assert not isinstance(value, Message), f"{name} is a message of protobuf"
        if isinstance(value, float) and not math.isnan(value):
            assert abs(value) <= LARGEST, f"{name} = {value}"
        if isinstance(value, int):
            assert 0 <= value < 1 << 64, f"{name} = {value}"
        if isinstance(value, str) and name not in _TEXTS_OF_OTHERS:
            assert len(value) <= 4096, f"{name} has {len(value)} characters"
        if isinstance(value, str) and name in ("job", "phase", "kind"):
            assert value.isprintable(), f"{name} = {value!r}"
            assert "/" not in value, f"{name} = {value!r}"


def _decoder(kind: type[Message], decode: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return
        look(decode(message))

    return parse


def _upload_state(message: Any) -> Any:
    return incoming.upload_state_of(message, 1 << 20)


_WIRE: dict[str, tuple[type[Message], Callable[[Any], Any]]] = {
    "an agent's message": (agent_pb2.FromAgent, from_agents.message_of),
    "an upload's header": (agent_pb2.UploadHeader, from_agents.offer_of),
    "a renewal": (agent_pb2.RenewRequest, from_agents.renewal_of),
    "a coordinator's message": (agent_pb2.ToAgent, incoming.message_of),
    "a receipt": (agent_pb2.UploadReceipt, incoming.receipt_of),
    "an upload's state": (agent_pb2.UploadState, _upload_state),
    "a download": (common_pb2.DownloadRequest, from_operators.download_of),
    "a submission": (operator_pb2.SubmitJobRequest, from_operators.submission_of),
    "a part of an artifact": (operator_pb2.PutPart, from_operators.header_of),
    "a job's name": (operator_pb2.JobRequest, from_operators.job_of),
    "a population": (operator_pb2.PrivacyRequest, from_operators.population_of),
    "a delta": (operator_pb2.PrivacyRequest, from_operators.delta_of),
    "a budget": (operator_pb2.PrivacyBudget, from_operators.budget_of),
    "a wish to invite": (administration_pb2.InviteRequest, from_operators.invitation_of),
    "a wish to revoke": (administration_pb2.RevokeRequest, from_operators.revocation_of),
    "a confirmation": (administration_pb2.ConfirmRequest, from_operators.confirmation_of),
    "a wish for a token": (administration_pb2.CreateTokenRequest, from_operators.token_of),
    "an enrolment": (administration_pb2.EnrollRequest, from_operators.enrolment_of),
}
DECODERS = {name: _decoder(*both) for name, both in _WIRE.items()}


def strange(name: str, seed: int) -> bytes:
    """A well-formed message of strange values for this decoder."""
    made = _WIRE[name][0]()
    fill(made, made.DESCRIPTOR, random.Random(seed))
    return made.SerializeToString()
