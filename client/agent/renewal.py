"""New certificates before the old ones expire, for the same keys, over the connection that stands.

Only certificates of the issuing authority are renewed online. Who was certified by the root offline is
reminded in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from roundtable.client.agent.connection import calling
from roundtable.client.agent.enrolment import requests_of
from roundtable.core.errors import ProtocolError, UnavailableError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import (
    CA_CERTIFICATE,
    IDENTITY_CERTIFICATE,
    NODE_CERTIFICATE,
    NODE_KEY,
    check_chain,
    load_credentials,
    load_silo_identity,
)
from roundtable.core.identity.signing import renewal_values, sign
from roundtable.core.observability.logs import request_metadata
from roundtable.proto import agent_pb2, agent_pb2_grpc

_log = logging.getLogger("roundtable.agent")
CHECK_SECONDS = 3600.0
REMAINING = 1 / 3
"""A certificate is renewed once less than this share of its life is left."""


async def keep_renewed(
    stub: agent_pb2_grpc.AgentsAsyncStub, folder: Path, pause: float = CHECK_SECONDS
) -> None:
    """Runs until cancelled; after a renewal it raises UnavailableError, so that the agent connects anew."""
    while True:
        if is_due(folder):
            if _depth(folder) == 0:
                until = load_credentials(folder).expires
                _log.warning(
                    "the certificate ends on %s: ask for a new one (`roundtable ca issue`)",
                    f"{until:%Y-%m-%d}",
                )
            elif await _renewed(stub, folder):
                raise UnavailableError("the certificate was renewed, and is shown from now on")
        # A short life needs a closer look.
        held = load_credentials(folder)
        life = (held.expires - held.issued).total_seconds()
        await asyncio.sleep(min(pause, life / 20))


def is_due(folder: Path, now: datetime | None = None) -> bool:
    """Whether the certificate is to be renewed now."""
    held, now = load_credentials(folder), now or datetime.now(UTC)
    return (held.expires - now) < (held.expires - held.issued) * REMAINING


async def _renewed(stub: agent_pb2_grpc.AgentsAsyncStub, folder: Path) -> bool:
    """Asks for certificates and keeps them. Each file is whole at any moment, and each fits its key."""
    try:
        with calling("the certificate could not be renewed"):
            response = await stub.Renew(renewal_request(folder), timeout=30.0, metadata=request_metadata())
    except (ProtocolError, UnavailableError) as error:
        _log.warning("%s; trying again", error)
        return False
    x.replace(folder / IDENTITY_CERTIFICATE, response.identity)
    x.replace(folder / NODE_CERTIFICATE, response.node)
    _log.info("the certificate was renewed until %s", f"{load_credentials(folder).expires:%Y-%m-%d %H:%M}")
    return True


def renewal_request(folder: Path) -> agent_pb2.RenewRequest:
    """Asks for certificates of the keys in a folder, signed with the identity that is to be renewed."""
    identity = load_silo_identity(folder)
    requests = requests_of(x.load_key(folder / NODE_KEY), identity.key)
    now = time.time()
    signature = sign(identity, "renewal", renewal_values(requests.node, requests.identity, now))
    return agent_pb2.RenewRequest(
        requests=requests,
        identity=identity.certificate,
        time=now,
        signature=signature,
        node=x.read(folder / NODE_CERTIFICATE),
    )


def _depth(folder: Path) -> int | None:
    chain = x.certificates_in(x.read(folder / NODE_CERTIFICATE), NODE_CERTIFICATE)
    roots = x.certificates_in(x.read(folder / CA_CERTIFICATE), CA_CERTIFICATE)
    return check_chain(chain, roots, datetime.now(UTC))
