"""A web server in an event loop that is ours: without signal handlers, on an address that may be taken."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from roundtable.core.errors import ResourceError
from roundtable.web.guard import Guard

STOP_SECONDS = 1
KEPT_SECONDS = 30
MOST_CONNECTIONS = 1000
MOST_HEADER = 16 << 10


class WebServer:
    """Serves an application under the names of `hosts`; over HTTPS where there is a `context`."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], context: ssl.SSLContext | None = None) -> None:
        settings = uvicorn.Config(
            Guard(app, hosts, context is not None),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEPT_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=MOST_HEADER,
        )
        settings.load()
        settings.ssl = context
        self._server = _Uvicorn(settings)
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def open(self, listen: str, setting: str) -> None:
        """Begins to serve at `listen`, host:port, which `setting` names; ResourceError where it is taken."""
        self.port = await self._server.startup_at(listen, setting)
        self._task = asyncio.get_running_loop().create_task(self._server.main_loop())

    async def close(self) -> None:
        """Serves no more; streams that are open are to be ended before."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            await self._server.shutdown()
            self._task = None


class _Uvicorn(uvicorn.Server):
    async def startup_at(self, listen: str, setting: str) -> int:
        """Takes the address; its port."""
        host, _, port = listen.rpartition(":")
        self.lifespan = self.config.lifespan_class(self.config)
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                lambda: self.config.http_protocol_class(  # type: ignore[call-arg]
                    config=self.config, server_state=self.server_state, app_state={}
                ),
                host.strip("[]"),
                int(port),
                ssl=self.config.ssl,
                backlog=self.config.backlog,
            )
        except OSError as error:
            raise ResourceError(
                f"{setting} = {listen!r}: this address cannot be taken "
                f"({error.strerror or error}); choose another one, or leave it out"
            ) from error
        self.servers = [server]
        self.started = True
        return int(server.sockets[0].getsockname()[1])

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield
