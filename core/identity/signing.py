"""Statements that are signed: who signed what, checked by anybody who knows the root.

A statement is a purpose and a JSON object in one canonical form, so that a signature given for one
purpose is none for another. The purposes:

    job         what a submitter asks for: configuration, initial model, request
    vouched     the coordinator's word for whose token asked for a job
    update      a silo's update of one step: its bytes, its weight, the model that it is for
    sum         a relay's sum of updates: its bytes, and whose updates are in it, with digests and weights
    region      a relay's model of a round within its region: its bytes, and what rounds have led to it
    receipt     what the coordinator did with an update; of a round within a region, what its relay did
    seal        the audit log up to an entry
    archive     which entries of the audit log a file of its own holds
    provenance  where a model comes from
    backup      what a coordinator's backup holds
    renewal     a silo's request for new certificates of its keys
    installation  which installation of an agent says hello
    passage     a silo's word that a relay may speak for this installation of it
    report      what an analysis answered, by whoever asked
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import Role, SiloIdentity, identity_of, verify_identity

VOUCHED_FOR = ("token:", "oidc:")
"""How the names begin of those who have nothing to sign with; no certificate's name can."""
PATH_MARK, MOST_RELAYS = "/", 8
"""Between the names of relays on a silo's way to the coordinator, and how many there can be."""
SUBMITTERS: tuple[Role, ...] = ("data-scientist", "operator", "admin")
Purpose = Literal[
    "job",
    "vouched",
    "update",
    "sum",
    "region",
    "receipt",
    "seal",
    "archive",
    "provenance",
    "backup",
    "renewal",
    "installation",
    "passage",
    "report",
]


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(values: Mapping[str, Any]) -> bytes:
    """The one JSON text of an object: sorted keys, no spaces; ValueError for NaN and infinity."""
    return _CANONICAL.encode(values).encode()


def job_digest(config: str) -> str:
    """BLAKE3 of a job's canonical JSON: what a silo approves."""
    return blake3(config.encode()).hexdigest()


def job_identifier(coordinator: str, submitter: str, request: str) -> str:
    """The identifier of the job that a request becomes: 12 hexadecimal digits that follow from the request.

    So a signature is one for this job, and cannot be shown under another identifier.
    """
    return blake3("\0".join((coordinator, submitter, request)).encode()).hexdigest()[:12]


def run_request(request: str, run: int) -> str:
    """The request that makes run `run` (from 1) of a series: the submitter's own for the first."""
    return request if run == 1 else f"{request}#{run}"


def signed_request(request: str, repeats: bool) -> tuple[str, int]:
    """What the submitter has signed of a job's request, and which run of a series the job is.

    A signature under a job that is repeated is one for all its runs: `job_identifier` of the run's own
    request is the run's. Of other jobs the request is what was signed.
    """
    head, mark, number = request.rpartition("#")
    if repeats and mark and number.isascii() and number.isdigit() and len(number) < 7:
        return head, int(number)
    return request, 1


def job_values(
    config: str, model: str, request: str, *, submitter: str, coordinator: str, time: float
) -> dict[str, str | float]:
    """What a submitter signs: one job, its configuration and initial model, for one coordinator, now.

    `coordinator` is the name that the root has certified, `request` names this one submission.
    """
    return {
        "job": job_identifier(coordinator, submitter, request),
        "coordinator": coordinator,
        "time": time,
        "config": job_digest(config),
        "model": model,
        "request": request,
    }


def renewal_values(node: bytes, identity: bytes, time: float) -> dict[str, str | float]:
    """What a silo signs to have both its certificates renewed: the two requests, now."""
    return {"node": blake3(node).hexdigest(), "identity": blake3(identity).hexdigest(), "time": time}


def passage_values(silo: str, relay: str, installation: bytes) -> dict[str, str]:
    """What a silo signs to be served by a relay: both names, and the public key of its installation.

    `relay` is the whole way to the coordinator, "west/east" for a relay `west` behind a relay `east`.
    """
    return {"silo": silo, "relay": relay, "installation": installation.hex()}


def sign(identity: SiloIdentity, purpose: Purpose, values: Mapping[str, Any]) -> bytes:
    """64 bytes of Ed25519 over the statement."""
    return identity.key.sign(_message(purpose, values))


@dataclass(frozen=True)
class Signed:
    """A document whose signature held at the time that it states.

    `ends` is when the signer's certificate ends. After that the signature alone proves nothing about when it
    was made: whoever has the key by then can state an earlier time.
    """

    signer: str
    values: dict[str, Any]
    time: float
    ends: float


def verify(
    certificate: bytes,
    ca: bytes,
    role: Role,
    purpose: Purpose,
    values: Mapping[str, Any],
    signature: bytes,
    *,
    at: float | None = None,
) -> str:
    """The signer's name; IdentityError unless the root vouches for it in this role, and it signed this.

    Certificates are judged by the Unix time `at`, default: now. Evidence is judged by when it was signed.
    """
    name, public = verify_identity(certificate, ca, role=role, now=None if at is None else _moment(at))
    check_signature(public, purpose, values, signature, name)
    return name


def check_signature(
    public: bytes, purpose: Purpose, values: Mapping[str, Any], signature: bytes, name: str
) -> None:
    """IdentityError unless this Ed25519 key signed the statement."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, _message(purpose, values))
    except (InvalidSignature, ValueError) as error:
        raise IdentityError(f"the signature of {name!r} under this {purpose} is not right") from error


def vouch(coordinator: SiloIdentity, submitter: str, values: Mapping[str, Any]) -> bytes:
    """The coordinator's signature under a job of somebody with a token."""
    return sign(coordinator, "vouched", {**values, "submitter": submitter})


def check_submission(
    certificate: bytes,
    ca: bytes,
    values: Mapping[str, Any],
    signature: bytes,
    submitter: str,
    *,
    at: float | None = None,
) -> None:
    """IdentityError unless the submitter, known to the root as one who may submit jobs, signed this one.

    Under a job of one with a token it is the coordinator who signs; for others its word does not count.
    Certificates are judged by the Unix time `at`, default: now.
    """
    name, role = identity_of(certificate)
    if role == "coordinator" and submitter.startswith(VOUCHED_FOR):
        verify(certificate, ca, role, "vouched", {**values, "submitter": submitter}, signature, at=at)
        return
    if role not in SUBMITTERS:
        raise IdentityError(f"{name!r} is {role}, and signs no jobs; that needs {' or '.join(SUBMITTERS)}")
    verify(certificate, ca, role, "job", values, signature, at=at)
    if name != submitter:
        raise IdentityError(f"the job of {submitter!r} is signed by {name!r}")


def envelope(identity: SiloIdentity, purpose: Purpose, values: Mapping[str, Any]) -> dict[str, Any]:
    """A signed document: the statement, its purpose, the signature in hexadecimal, and the certificate."""
    return {
        "purpose": purpose,
        "statement": dict(values),
        "signature": sign(identity, purpose, values).hex(),
        "certificate": identity.certificate.decode(),
    }


def open_envelope(document: Mapping[str, Any], ca: bytes, role: Role, purpose: Purpose) -> Signed:
    """A signed document whose statement says its `time`, by which the signer's certificate is judged.

    IdentityError where it is not what it should be.
    """
    try:
        values, certificate = dict(document["statement"]), str(document["certificate"]).encode()
        signature, stated = bytes.fromhex(document["signature"]), document["purpose"]
        time = float(values["time"])
    except (KeyError, TypeError, ValueError) as error:
        raise IdentityError(f"this is not a signed {purpose}: {error}") from error
    if stated != purpose:
        raise IdentityError(f"this is a signed {str(stated)[:40]}, not a {purpose}")
    signer = verify(certificate, ca, role, purpose, values, signature, at=time)
    ends = x.certificates_in(certificate, "the certificate")[0].not_valid_after_utc.timestamp()
    return Signed(signer, values, time, ends)


def _moment(time: float) -> datetime:
    try:
        return datetime.fromtimestamp(time, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise IdentityError(f"{time!r} is not a time: {error}") from error


def _message(purpose: Purpose, values: Mapping[str, Any]) -> bytes:
    return b"roundtable:" + purpose.encode() + b"\0" + canonical(values)
