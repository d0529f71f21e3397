"""What a silo signs about each update: checked before a byte is taken, kept as evidence."""

from __future__ import annotations

from roundtable.core.errors import IdentityError
from roundtable.core.foreign_text import printable
from roundtable.core.identity.signing import verify
from roundtable.proto import agent_pb2
from roundtable.proto.receipts import update_values
from roundtable.server.jobs.sessions import Identity
from roundtable.server.store.rows import to_json


def unsigned(
    header: agent_pb2.UploadHeader, identity: Identity | None, model: str, client: str, authority: bytes
) -> str:
    """Why the update is not one that this silo has signed for `model`; empty for a silo without an identity.

    `model` is what the silo was asked to train from, "" where that is not known; `authority` is the root's
    certificate (PEM).
    """
    if identity is None:
        return ""
    if model and header.model != model:
        named = printable(header.model[:12])
        return f"the update is for the model {named!r}, and {model[:12]!r} was asked about"
    values, certificate = update_values(client, header), identity.certificate
    try:
        verify(certificate, authority, "agent", "update", values, header.signature, at=header.time)
    except (IdentityError, ValueError) as error:
        return f"the update is not signed by the silo's identity: {error}"
    return ""


def signed_statement(header: agent_pb2.UploadHeader, identity: Identity | None, client: str) -> str:
    """What the silo has signed, as JSON in the form of `core.identity.signing.envelope`; "" for nothing."""
    if identity is None:
        return ""
    document = {
        "purpose": "update",
        "statement": update_values(client, header),
        "signature": header.signature.hex(),
        "certificate": identity.certificate.decode(),
    }
    return to_json(document)
