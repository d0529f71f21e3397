"""The page's web server, in the coordinator's own event loop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from cryptography import x509
from typing_extensions import override

from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.identity import certificates as x
from roundtable.page.application import Application
from roundtable.page.guard import LOCAL, Guard
from roundtable.server.auth.page_sessions import DashboardTable
from roundtable.server.config import ServerConfig
from roundtable.server.dashboard import BehindThePage

log = logging.getLogger("roundtable.page.serving")

STOP_SECONDS = 1
KEPT_SECONDS = 30
MOST_CONNECTIONS = 1000
MOST_HEADER = 16 << 10


class CoordinatorDashboard:
    """Serves `[dashboard]` while a coordinator is active."""

    def __init__(self, config: ServerConfig) -> None:
        self._table = config.dashboard
        self._folder = Path(config.credentials)
        self._server: _PageServer | None = None
        self._application: Application | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def open(self, behind: BehindThePage) -> None:
        """Begins to serve. ResourceError for an address that is taken, ConfigError for a bad certificate."""
        table = self._table
        if not table.listen:
            return
        certificate = Path(table.certificate or self._folder / "node.crt")
        key = Path(table.key or self._folder / "node.key")
        hosts = {*LOCAL, *table.hosts, table.listen.rpartition(":")[0].strip("[]")}
        if table.tls:
            hosts |= _names_in(certificate)
        self._application = Application(behind, table.tls)
        settings = uvicorn.Config(
            Guard(self._application.app, hosts, table.tls),
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
        if table.tls:
            settings.ssl = _context(certificate, key)
        self._server = _PageServer(settings)
        await self._server.startup_at(table)
        self.port = self._server.port
        self._task = asyncio.get_running_loop().create_task(self._server.main_loop())
        scheme = "https" if table.tls else "http"
        log.info("the page is at %s://%s:%d", scheme, table.listen.rpartition(":")[0], self.port)

    async def close(self) -> None:
        """Ends the streams first: the web server would wait for them."""
        if self._server is None or self._application is None or self._task is None:
            return
        await self._application.close()
        self._server.should_exit = True
        await self._task
        await self._server.shutdown()
        self._server = self._application = self._task = None


class _PageServer(uvicorn.Server):
    """Uvicorn without its signal handlers, on a socket of ours: an address that is taken is our error."""

    port = 0

    async def startup_at(self, table: DashboardTable) -> None:
        host, _, port = table.listen.rpartition(":")
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
                f"dashboard.listen = {table.listen!r}: this address cannot be taken "
                f"({error.strerror or error}); choose another one, or leave it out"
            ) from error
        self.servers = [server]
        self.port = server.sockets[0].getsockname()[1]
        self.started = True

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"dashboard: {certificate} and {key} cannot be used for HTTPS: {error}; "
            "give a certificate and its key as PEM files"
        ) from error
    return context


def _names_in(certificate: Path) -> set[str]:
    """The names and addresses that a certificate is for."""
    own = x.certificates_in(x.read(certificate), certificate)[0]
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    found = set(names.get_values_for_type(x509.DNSName))
    return found | {str(address) for address in names.get_values_for_type(x509.IPAddress)}
