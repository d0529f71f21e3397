"""What a silo signs about each update: checked before a byte is taken, kept as evidence."""

from __future__ import annotations

from roundtable.core.errors import IdentityError
from roundtable.core.identity.signing import verify
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.jobs.sessions import Identity
from roundtable.server.store.rows import to_json


def unsigned(offer: UploadOffer, identity: Identity | None, model: str, client: str, authority: bytes) -> str:
    """Why the update is not one that this silo has signed for `model`; empty for a silo without an identity.

    `model` is what the silo was asked to train from, "" where that is not known; `authority` is the root's
    certificate (PEM).
    """
    if identity is None:
        return ""
    if model and offer.model != model:
        return f"the update is for the model {offer.model[:12]!r}, and {model[:12]!r} was asked about"
    values, certificate = {**offer.statement, "client": client}, identity.certificate
    try:
        verify(certificate, authority, "agent", "update", values, offer.signature, at=offer.time)
    except (IdentityError, ValueError) as error:
        return f"the update is not signed by the silo's identity: {error}"
    return ""


def signed_statement(offer: UploadOffer, identity: Identity | None, client: str) -> str:
    """What the silo has signed, as JSON in the form of `core.identity.signing.envelope`.

    "" for a silo without an identity, and for what is flawed: it may hold anything, and is not kept.
    """
    if identity is None or offer.flaw:
        return ""
    document = {
        "purpose": "update",
        "statement": {**offer.statement, "client": client},
        "signature": offer.signature.hex(),
        "certificate": identity.certificate.decode(),
    }
    return to_json(document)
