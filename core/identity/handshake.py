"""Why a connection to the coordinator fails, in words: one TLS handshake, made by hand and watched.

gRPC reports every refusal as "unavailable"; this tells a wrong address from a certificate of
another authority, an expired one, one for another name, and a server that does not accept ours.

Neither does gRPC for Python look at lists of revoked certificates. So the certificate is looked at in a
handshake of its own, and the channel that follows is tied to exactly that one: `trusted_root`.
"""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

from cryptography import x509

from roundtable.core.errors import ConfigError, IdentityError, ProtocolError, UnavailableError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY, TOKEN
from roundtable.core.identity.revocation import RevocationList, load_list

_AGAIN_SECONDS = 0.5
_GRPC = "h2"
_EXPIRED = 10
_UNTRUSTED = {18, 19, 20, 21}
_OTHER_NAME = {62, 64}


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; ConfigError with the expected form otherwise."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or "/" in bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{address!r} is not an address; write host:port, for example coordinator.example.org:7443"
        )
    return bare, int(port)


def check_connection(
    address: str, credentials: Path, timeout: float = 5.0, revoked: RevocationList | None = None
) -> None:
    """Makes one TLS handshake with the coordinator; its failure is one sentence with the remedy.

    `credentials` is a folder that `load_credentials` has accepted, `revoked` the list to go by; default: the
    one in the folder. Raises UnavailableError if nobody answers within about `timeout` seconds, ProtocolError
    if no TLS is spoken there, and IdentityError if either side does not accept the other's certificate.
    """
    listed = load_list(credentials) if revoked is None else revoked
    try:
        _connect(address, credentials, timeout, listed, shows=True)
    except (IdentityError, ProtocolError):
        # A coordinator that was killed at this moment looks the same; what is wrong stays wrong.
        time.sleep(_AGAIN_SECONDS)
        _connect(address, credentials, timeout, listed, shows=True)


def trusted_root(
    address: str, credentials: Path, timeout: float = 5.0, revoked: RevocationList | None = None
) -> bytes:
    """What a channel to this coordinator shall trust, PEM: without a list of revoked certificates, ca.crt.

    With one, the very certificate that the coordinator shows now, once it is found good and not on the
    list: the channel then accepts no other, so nobody can show another one in the meantime. Nothing of
    ours is shown before. Errors as those of `check_connection`.
    """
    listed = load_list(credentials) if revoked is None else revoked
    if not listed.serials:
        return x.read(credentials / CA_CERTIFICATE)
    return _connect(address, credentials, timeout, listed, shows=False)


def _connect(
    address: str, credentials: Path, timeout: float, revoked: RevocationList, *, shows: bool
) -> bytes:
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout) as raw:
            raw.settimeout(timeout)
            return _handshake(raw, host, address, credentials, revoked, shows)
    except socket.gaierror as error:
        raise UnavailableError(
            f"the host name {host!r} cannot be resolved ({error.strerror}); check its spelling and the DNS"
        ) from error
    except ConnectionRefusedError as error:
        raise UnavailableError(
            f"nothing listens at {address}; start the coordinator (`roundtable server`), or check the port"
        ) from error
    except TimeoutError as error:
        raise UnavailableError(
            f"{address} does not answer within {timeout:g} s; a firewall may be in the way"
        ) from error
    except OSError as error:
        raise UnavailableError(f"{address} cannot be reached: {error.strerror or error}") from error


def _handshake(
    raw: socket.socket, host: str, address: str, credentials: Path, revoked: RevocationList, shows: bool
) -> bytes:
    """The coordinator's certificate, PEM. Only where ours is shown too the coordinator must accept it."""
    context, welcomed, verdict = _context(credentials, shows), not shows, b""
    try:
        with context.wrap_socket(raw, server_hostname=host) as connection:
            verdict = _judged(connection, address, credentials, revoked)
            if connection.selected_alpn_protocol() != _GRPC:
                raise ProtocolError(
                    f"{address} speaks TLS and no gRPC, as the coordinator's page does; name the port of its "
                    "`listen` (often 7443), and of `operators` where it has one"
                )
            if shows:
                # The server judges our certificate after our side of the handshake is over.
                welcomed = bool(connection.recv(1))
    except ssl.SSLCertVerificationError as error:
        raise IdentityError(_describe(error, host, address, credentials)) from error
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            raise ProtocolError(
                f"{address} does not speak TLS ({error.reason}); "
                "check that the port is the coordinator's and no proxy stands between"
            ) from error
    except ConnectionResetError:
        pass
    if not welcomed:
        if (credentials / TOKEN).exists():
            raise IdentityError(
                f"{address} wants a certificate: with a token, as in {credentials}, connect to the "
                "coordinator's `enrolment` address (often port 7444)"
            )
        shown = credentials / NODE_CERTIFICATE
        raise IdentityError(
            f"the coordinator at {address} closed the connection: it does not accept {shown}; "
            "it must come from the coordinator's own authority and be valid by the coordinator's clock"
        )
    if not verdict:
        raise UnavailableError(f"{address} ended the connection before it showed a certificate")
    return verdict


def _context(credentials: Path, shows: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(credentials / CA_CERTIFICATE))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if shows and (credentials / NODE_CERTIFICATE).exists():
        # Without an answer of ours a sealed key would make OpenSSL ask at the terminal.
        sealed = (credentials / NODE_CERTIFICATE, credentials / NODE_KEY)
        context.load_cert_chain(*sealed, password=lambda: x.passphrase() or b"")
    context.set_alpn_protocols([_GRPC])
    return context


def _judged(connection: ssl.SSLSocket, address: str, credentials: Path, revoked: RevocationList) -> bytes:
    """The certificate that TLS has verified, if it is not revoked.

    Only the root certifies coordinators. So where there is a list no authority in between is let pass, which
    might be revoked itself.
    """
    raw = connection.getpeercert(binary_form=True)
    assert raw is not None, "a client is always shown one"
    certificate, ca = x509.load_der_x509_certificate(raw), credentials / CA_CERTIFICATE
    who = f"the coordinator at {address}"
    if revoked.serials and not any(
        x.issued_by(certificate, one) for one in x.certificates_in(x.read(ca), ca)
    ):
        raise IdentityError(f"the certificate of {who} was not issued by the root itself; nothing was sent")
    try:
        revoked.check([certificate], who)
    except IdentityError as error:
        raise IdentityError(
            f"{error}; nothing was sent. Its operator must issue a new one with `roundtable ca issue`"
        ) from None
    return x.pem_of(certificate)


def _describe(error: ssl.SSLCertVerificationError, host: str, address: str, credentials: Path) -> str:
    if error.verify_code in _OTHER_NAME:
        return (
            f"the certificate of the coordinator at {address} is not for the name {host!r}; "
            f"connect under a name that it holds, or issue it anew with --host {host}"
        )
    if error.verify_code == _EXPIRED:
        return (
            f"the certificate of the coordinator at {address} has expired; "
            "its operator must issue a new one with `roundtable ca issue`"
        )
    if error.verify_code in _UNTRUSTED:
        return (
            f"the certificate of the coordinator at {address} is from another authority than "
            f"{credentials / CA_CERTIFICATE}; check the address, or get the coordinator's ca.crt"
        )
    return f"the certificate of the coordinator at {address} is not acceptable: {error.verify_message}"
