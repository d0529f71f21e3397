"""A web server in an event loop that is ours: without signal handlers, on an address that may be taken."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from roundtable.core.errors import ResourceError
from roundtable.web.guard import Guard

log = logging.getLogger("roundtable.web")

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


@contextmanager
def served_beside(
    app: ASGIApp,
    hosts: Collection[str],
    listen: str,
    setting: str,
    at_end: Callable[[], Awaitable[None]] | None = None,
) -> Iterator[int]:
    """Serves over HTTP in a thread with an event loop of its own, meanwhile; gives the port.

    `at_end` ends streams that are open, in that loop. Raises ResourceError as `WebServer.open`.
    """
    begun: Future[int] = Future()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = WebServer(app, hosts)
        await server.open(listen, setting)
        begun.set_result(server.port)
        await over.wait()
        if at_end is not None:
            await at_end()
        await server.close()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if begun.done():
                log.exception("the page has ended; what it showed goes on")
            else:
                begun.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="page", daemon=True)
    thread.start()
    try:
        yield begun.result()
    finally:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(over.set)
        thread.join()


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
