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

    def __init__(self, active: Callable[[], str]) -> None:
        self._active = active

    @override
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(request: Any, context: Any) -> None:
            where = self._active() or "an unknown address"
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"{STANDBY}: the active coordinator is the one at {where}; this one takes over when it fails",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)


@asynccontextmanager
async def standing_by(listen: str, credentials: Credentials, active: Callable[[], str]) -> AsyncIterator[int]:
    """Listens and refuses every call while the block lasts; yields the port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Everything(active),))
    secure = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)], credentials.ca, require_client_auth=True
    )
    port = server.add_secure_port(listen, secure)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
