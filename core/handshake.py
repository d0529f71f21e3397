"""Why a connection to the coordinator fails, in words: one TLS handshake, made by hand and watched.

gRPC reports every refusal as "unavailable"; this tells a wrong address from a certificate of
another authority, an expired one, one for another name, and a server that does not accept ours.
"""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

from roundtable.core.certificates import passphrase
from roundtable.core.errors import ConfigError, IdentityError, ProtocolError, UnavailableError
from roundtable.core.identity import CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY

_AGAIN_SECONDS = 0.5
_EXPIRED = 10
_UNTRUSTED = {18, 19, 20, 21}
_OTHER_NAME = {62, 64}


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; ConfigError with the expected form otherwise."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{address!r} is no address; write host:port, for example coordinator.example.org:7443"
        )
    return bare, int(port)


def check_connection(address: str, credentials: Path, timeout: float = 5.0) -> None:
    """Makes one TLS handshake with the coordinator; its failure is one sentence with the remedy.

    `credentials` is a folder that `load_credentials` has accepted. Raises UnavailableError if nobody
    answers within about `timeout` seconds, ProtocolError if no TLS is spoken there, and IdentityError
    if either side does not accept the other's certificate.
    """
    try:
        _connect(address, credentials, timeout)
    except (IdentityError, ProtocolError):
        # A coordinator that was killed at this moment looks the same; what is wrong stays wrong.
        time.sleep(_AGAIN_SECONDS)
        _connect(address, credentials, timeout)


def _connect(address: str, credentials: Path, timeout: float) -> None:
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout) as raw:
            raw.settimeout(timeout)
            _handshake(raw, host, address, credentials)
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


def _handshake(raw: socket.socket, host: str, address: str, credentials: Path) -> None:
    context = ssl.create_default_context(cafile=str(credentials / CA_CERTIFICATE))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if (credentials / NODE_CERTIFICATE).exists():
        # Without an answer of ours a sealed key would make OpenSSL ask at the terminal.
        sealed = (credentials / NODE_CERTIFICATE, credentials / NODE_KEY)
        context.load_cert_chain(*sealed, password=lambda: passphrase() or b"")
    context.set_alpn_protocols(["h2"])
    welcomed = False
    try:
        with context.wrap_socket(raw, server_hostname=host) as connection:
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
        shown = credentials / NODE_CERTIFICATE
        raise IdentityError(
            f"the coordinator at {address} closed the connection: it does not accept {shown}; "
            "it must come from the coordinator's own authority and be valid by the coordinator's clock"
        )


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
