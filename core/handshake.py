"""Why a connection to the coordinator fails, in words: one TLS handshake, made by hand and watched.

gRPC reports every refusal as "unavailable"; this tells a wrong address from a certificate of
another authority, an expired one, one for another name, and a server that does not accept ours.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from roundtable.core.errors import ConfigError
from roundtable.core.identity import CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY

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


def diagnose_connection(address: str, credentials: Path, timeout: float = 5.0) -> str:
    """One sentence about what is wrong and what to do; "" if the handshake succeeds.

    `credentials` is a folder that `load_credentials` has accepted. Makes one TCP connection, which
    takes at most about twice `timeout` seconds.
    """
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout) as raw:
            return _handshake(raw, host, address, credentials)
    except socket.gaierror as error:
        return f"the host name {host!r} cannot be resolved ({error.strerror}); check its spelling and the DNS"
    except ConnectionRefusedError:
        return f"nothing listens at {address}; start the coordinator (`roundtable server`), or check the port"
    except TimeoutError:
        return f"{address} does not answer within {timeout:g} s; a firewall may be in the way"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"


def _handshake(raw: socket.socket, host: str, address: str, credentials: Path) -> str:
    context = ssl.create_default_context(cafile=str(credentials / CA_CERTIFICATE))
    context.load_cert_chain(credentials / NODE_CERTIFICATE, credentials / NODE_KEY)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(raw, server_hostname=host) as connection:
            # The server judges our certificate after our side of the handshake is over.
            welcomed = bool(connection.recv(1))
    except ssl.SSLCertVerificationError as error:
        return _describe(error, host, address, credentials)
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            welcomed = False
        else:
            return (
                f"{address} does not speak TLS ({error.reason}); "
                "check that the port is the coordinator's and no proxy stands between"
            )
    except ConnectionResetError:
        welcomed = False
    if welcomed:
        return ""
    shown = credentials / NODE_CERTIFICATE
    return (
        f"the coordinator at {address} closed the connection: it does not accept {shown}; "
        "it must be issued by the coordinator's own authority and not be expired by the coordinator's clock"
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
