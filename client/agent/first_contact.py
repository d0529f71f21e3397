"""Checks an agent's first connection: mistakes that waiting cannot mend end it at once."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from pathlib import Path

from roundtable.core.errors import IdentityError, ProtocolError, RoundtableError, UnavailableError
from roundtable.core.identity.credentials import Credentials
from roundtable.core.identity.handshake import check_connection, split_address

_log = logging.getLogger("roundtable.agent")


def check_first_contact(addresses: Iterable[str], credentials: Path, acquainted: Path) -> None:
    """Tries each address until one is not plainly wrong; of no effect once `acquainted` exists.

    An agent that has met its coordinator comes back after every loss, so it must not end for what may
    be a passing trouble. One that never has is being installed, and somebody watches. A coordinator
    that does not answer yet is waited for.

    Raises UnavailableError for a name that does not exist, ProtocolError where no TLS is spoken, and
    IdentityError where either side does not accept the other's certificate.
    """
    if acquainted.exists():
        return
    wrong: RoundtableError | None = None
    for address in addresses:
        try:
            check_connection(address, credentials)
        except (IdentityError, ProtocolError) as error:
            wrong = wrong or error
        except UnavailableError as error:
            if _exists(address):
                _log.info("%s; waiting for it", error)
                return
            wrong = wrong or error
        else:
            return
    if wrong is not None:
        raise wrong


def _exists(address: str) -> bool:
    """Whether the host may exist; False only where the name service says that it does not."""
    try:
        socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.errno == socket.EAI_AGAIN
    return True


def check_role(identity: Credentials) -> None:
    """IdentityError unless these are an agent's credentials."""
    if identity.role != "agent":
        raise IdentityError(
            f"the certificate of {identity.name!r} is one of an {identity.role}; an agent needs one with the "
            "role agent: make it with `roundtable ca issue --role agent`"
        )
