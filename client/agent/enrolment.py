"""How a silo that was invited becomes one that may connect: its keys are made here and never leave.

The invitation holds the fingerprint of the authority. The coordinator's word for who it is counts for
nothing until its certificate leads to exactly that authority; only then is the secret sent.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from roundtable.core.errors import IdentityError, RoundtableError, UnavailableError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import (
    CA_CERTIFICATE,
    IDENTITY_CERTIFICATE,
    IDENTITY_KEY,
    NODE_CERTIFICATE,
    NODE_KEY,
    Credentials,
    check_chain,
    fingerprint_of,
    load_credentials,
    load_silo_identity,
)
from roundtable.core.identity.handshake import split_address
from roundtable.core.identity.invitation import Invitation
from roundtable.proto import administration_pb2 as pb
from roundtable.proto import administration_pb2_grpc, common_pb2

DEFAULT_PORT = 7444
_WHICH = (
    f"it is the coordinator's `enrolment` address (often port {DEFAULT_PORT}), "
    "not the one that agents connect to"
)
_SECONDS = 20.0


def enroll(coordinator: str, invitation: Invitation, folder: Path, seal: bytes | None = None) -> Credentials:
    """Fills a credentials folder; `seal` is a passphrase for the keys. Can be repeated if it broke off.

    Raises IdentityError where the coordinator is not the one of the invitation, or does not accept it,
    and UnavailableError where it cannot be reached.
    """
    address = coordinator if ":" in coordinator else f"{coordinator}:{DEFAULT_PORT}"
    if (folder / NODE_CERTIFICATE).exists():
        raise IdentityError(f"{folder} holds credentials already; choose another folder with --credentials")
    ca = _authority(address, invitation.fingerprint)
    node, identity = _keys(folder, seal)
    request = pb.EnrollRequest(
        identifier=invitation.secret.identifier,
        secret=invitation.secret.secret,
        requests=requests_of(node, identity),
    )
    with _calling(address), _channel(address, ca) as stub:
        response = stub.Enroll(request, timeout=_SECONDS)
    x.write_new(
        folder, {CA_CERTIFICATE: ca, NODE_CERTIFICATE: response.node, IDENTITY_CERTIFICATE: response.identity}
    )
    if seal:
        os.environ.setdefault(x.PASSPHRASE, seal.decode())
    load_silo_identity(folder)
    return load_credentials(folder)


def requests_of(node: x.PrivateKey, identity: x.PrivateKey) -> common_pb2.CertificateRequests:
    """What is sent of two keys: their public halves, signed."""
    return common_pb2.CertificateRequests(node=x.signing_request(node), identity=x.signing_request(identity))


def _authority(address: str, fingerprint: bytes) -> bytes:
    """The root certificate that the invitation means, and that the server's own certificate leads to."""
    host, port = split_address(address)
    try:
        shown = ssl.get_server_certificate((host, port), timeout=_SECONDS).encode()
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{address} cannot be reached for enrolment: {error}; {_WHICH}") from error
    with _calling(address), _channel(address, shown) as stub:
        ca: bytes = stub.Authority(pb.AuthorityRequest(), timeout=_SECONDS).certificate
    chain = x.certificates_in(shown, "the coordinator's certificate")
    now = datetime.now(UTC)
    if (
        fingerprint_of(ca) != fingerprint
        or check_chain(chain, x.certificates_in(ca, CA_CERTIFICATE), now) is None
    ):
        raise IdentityError(
            f"{address} is not the coordinator of this invitation: its authority has another fingerprint. "
            "Nothing was sent. Check the address; if it is right, the connection is being intercepted"
        )
    return ca


def _keys(folder: Path, seal: bytes | None) -> tuple[x.PrivateKey, x.PrivateKey]:
    """Two fresh keys, or those that an enrolment which broke off has left."""
    if not (folder / NODE_KEY).exists():
        fresh: dict[str, x.PrivateKey] = {
            NODE_KEY: ec.generate_private_key(ec.SECP256R1()),
            IDENTITY_KEY: ed25519.Ed25519PrivateKey.generate(),
        }
        x.write_new(folder, {name: x.pem_of_key(key, seal) for name, key in fresh.items()})
        return fresh[NODE_KEY], fresh[IDENTITY_KEY]
    return x.load_key(folder / NODE_KEY), x.load_key(folder / IDENTITY_KEY)


@contextlib.contextmanager
def _channel(address: str, roots: bytes) -> Iterator[administration_pb2_grpc.EnrolmentStub]:
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(roots)) as channel:
        yield administration_pb2_grpc.EnrolmentStub(channel)


@contextlib.contextmanager
def _calling(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _explained(error, address) from error


def _explained(error: grpc.RpcError, address: str) -> RoundtableError:
    code, detail = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        if "Hostname Verification" in detail:
            host = address.rpartition(":")[0]
            return IdentityError(
                f"the certificate of the coordinator at {address} is not for the name {host!r}; use a name "
                "that it holds, or ask its operator to issue it anew with this one as --host"
            )
        return UnavailableError(f"{address} cannot be reached for enrolment: {detail}; {_WHICH}")
    return IdentityError(f"the coordinator at {address} does not enrol this silo: {detail}")
