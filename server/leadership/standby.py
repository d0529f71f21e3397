"""What a coordinator says while another one is active: to every call, that it only stands by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from typing_extensions import override

from roundtable.core.identity.credentials import Credentials
from roundtable.proto.channel import SERVER_OPTIONS

STANDBY = "standby"
"""How the details of the refusal begin: agents then try the next address and come back soon."""


class _Everything(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers every method of every service alike."""

    def __init__(self, active: Callable[[], str], apart: bool) -> None:
        self._active = active
        self._known_by = (
            " (for agents and relays; operators have an address of their own there)" if apart else ""
        )

    @override
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(request: Any, context: Any) -> None:
            where = (self._active() or "an unknown address") + self._known_by
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"{STANDBY}: the active coordinator is the one at {where}; this one takes over when it fails",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)


@asynccontextmanager
async def standing_by(
    listen: str, operators: str, credentials: Credentials, active: Callable[[], str]
) -> AsyncIterator[tuple[str, str]]:
    """Listens and refuses every call while the block lasts; yields both addresses with their ports.

    `operators` is "" where operators have no address of their own.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Everything(active, bool(operators)),))
    secure = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)], credentials.ca, require_client_auth=True
    )
    opened = [_opened(server, address, secure) for address in (listen, operators)]
    await server.start()
    try:
        yield opened[0], opened[1]
    finally:
        await server.stop(0)


def _opened(server: grpc.aio.Server, address: str, secure: grpc.ServerCredentials) -> str:
    """The address with the port that was opened; "" for ""."""
    if not address:
        return ""
    return f"{address.rpartition(':')[0]}:{server.add_secure_port(address, secure)}"
