"""An address at which agents or operators connect, by TLS.

Certificates are read anew when their files change: renewed ones need no restart and cut no connection.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import grpc

from roundtable.core.errors import IdentityError, ResourceError
from roundtable.core.identity.credentials import (
    CA_CERTIFICATE,
    NODE_CERTIFICATE,
    NODE_KEY,
    Credentials,
    load_credentials,
)

log = logging.getLogger("roundtable.server.services.secure_port")


def open_port(
    server: grpc.aio.Server,
    address: str,
    folder: Path,
    credentials: Credentials,
    key: str = "listen",
    *,
    certificates: bool = True,
) -> int:
    """Opens the address and returns its port; with `certificates` who connects must show one.

    `folder` holds the credentials, `key` names the setting. ResourceError if the address is taken.
    """
    files = _Files(folder, credentials)
    secure = grpc.dynamic_ssl_server_credentials(
        files.current(),
        files.changed,  # type: ignore[arg-type]  # None: nothing has changed
        certificates,
    )
    try:
        return server.add_secure_port(address, secure)
    except RuntimeError as error:
        reason = str(error).partition(";")[0]
        raise ResourceError(
            f"cannot listen on {address}: {reason}; does another process listen here? "
            f"Choose another address ({key})"
        ) from error


class _Files:
    """The credentials' files, watched: gRPC asks before each handshake."""

    def __init__(self, folder: Path, credentials: Credentials) -> None:
        self._folder = folder
        self._credentials = credentials
        self._seen = self._times()

    def current(self) -> grpc.ServerCertificateConfiguration:
        """The certificate that is shown and the authority that is trusted now."""
        shown = self._credentials
        return grpc.ssl_server_certificate_configuration([(shown.key, shown.certificate)], shown.ca)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """New credentials, if complete ones have come; half copied ones are read again next time."""
        times = self._times()
        if times == self._seen:
            return None
        try:
            self._credentials = load_credentials(self._folder)
        except IdentityError as error:
            log.warning("the new certificate is not used yet: %s", error)
            return None
        self._seen = times
        log.info("a new certificate is shown from now on, until %s", self._credentials.expires)
        return self.current()

    def _times(self) -> list[float]:
        paths = [self._folder / name for name in (CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY)]
        return [path.stat().st_mtime if path.exists() else 0.0 for path in paths]


def check_port(listen: str, key: str = "listen") -> None:
    """Raises ResourceError with the system's reason where a port cannot be had; gRPC gives none.

    `key` names the setting.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        raise _port_taken(listen, error.strerror or str(error), key) from error


def _port_taken(listen: str, reason: str, key: str) -> ResourceError:
    return ResourceError(
        f"cannot listen on {listen}: {reason}; does another coordinator run here? "
        f"Choose another address with --{key} host:port"
    )
