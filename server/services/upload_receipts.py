"""What is signed about an update: the silo's statement, and the coordinator's receipt in whichever answer.

The statement is checked before a byte is taken, and kept as evidence.

A receipt says what is durable, and is made from that: a silo that has lost an answer asks again, and is given
one that proves the same. So a proof is not lost with a connection, by chance or on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from roundtable.core.errors import IdentityError
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import sign, verify
from roundtable.proto import agent_pb2, common_pb2
from roundtable.proto.receipts import receipt_values
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.jobs.sessions import Identity
from roundtable.server.store.rows import to_json

Receipt = agent_pb2.UploadReceipt


class Outcome(NamedTuple):
    """What became of an update; `again` where this was decided before it was asked for now."""

    status: agent_pb2.UploadReceipt.Status.ValueType
    reason: str = ""
    again: bool = False


class Receipts:
    """Gives receipts with time and signature, so that a silo can show them to others.

    `sealed` tells the last entry of the audit log that is signed, and its hash.
    """

    def __init__(
        self,
        identity: SiloIdentity | None,
        sealed: Callable[[], tuple[int, str]],
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._sealed = sealed
        self._clock = clock

    def give(self, client: str, update: UploadOffer, outcome: Outcome) -> Receipt:
        """The receipt for this update of a client."""
        sequence, digest = self._sealed()
        receipt = Receipt(
            status=outcome.status,
            reason=outcome.reason,
            time=self._clock(),
            sealed=sequence,
            sealed_hash=digest,
        )
        if self._identity is not None:
            step = update.at.step
            header = agent_pb2.UploadHeader(
                step=common_pb2.Step(job=update.at.job, round=step.round, attempt=step.attempt),
                content=common_pb2.Artifact(digest=update.digest, size=update.size),
            )
            receipt.signature = sign(self._identity, "receipt", receipt_values(client, header, receipt))
        return receipt


def settled(decided: tuple[str, str, str, int], update: UploadOffer) -> Outcome:
    """The outcome for an update whose step has one: `decided` is (receipt, reason, digest, size) as written.

    ACCEPTED is said again of the very same bytes only; of others DUPLICATE, with those that count.
    """
    receipt, reason, digest, size = decided
    if receipt != "accepted":
        return Outcome(Receipt.REJECTED, reason, again=True)
    if (digest, size) == (update.digest, update.size):
        return Outcome(Receipt.ACCEPTED, again=True)
    return Outcome(
        Receipt.DUPLICATE, f"another update of this step was accepted before: {digest[:12]}", again=True
    )


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
