"""Decodes who asked for a job, and the proof of it."""

from __future__ import annotations

from dataclasses import dataclass

from roundtable.core import bounds
from roundtable.proto import common_pb2

_NAME_CHARACTERS = 500


@dataclass(frozen=True)
class SubmissionProof:
    """Who asked for a job, and the proof of it."""

    submitter: str
    request_id: str
    signature: bytes
    certificate: bytes
    initial_model: str
    time: float
    coordinator: str


def submission_of(message: common_pb2.Submission) -> SubmissionProof:
    """The proof in an instruction; ProtocolError for what does not pass."""
    model = message.initial_model
    return SubmissionProof(
        bounds.text(message.submitter, _NAME_CHARACTERS, "a submitter's name"),
        bounds.text(message.request_id, _NAME_CHARACTERS, "a request's identifier"),
        bounds.bounded(message.signature, bounds.SIGNATURE_BYTES, "a submitter's signature"),
        bounds.bounded(message.certificate, bounds.CERTIFICATE_BYTES, "a submitter's certificate"),
        model and bounds.digest(model, "a job's initial model"),
        bounds.within(message.time, 0.0, bounds.LATEST, "the time of a signature"),
        bounds.text(message.coordinator, _NAME_CHARACTERS, "a coordinator's name"),
    )
