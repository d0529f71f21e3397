"""The page's web server, in the coordinator's own event loop."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from cryptography import x509

from roundtable.core.errors import ConfigError
from roundtable.core.identity import certificates as x
from roundtable.page.application import Application
from roundtable.server.config import ServerConfig
from roundtable.server.dashboard import BehindThePage
from roundtable.web.guard import LOCAL
from roundtable.web.web_server import WebServer

log = logging.getLogger("roundtable.page.serving")


class CoordinatorDashboard:
    """Serves `[dashboard]` while a coordinator is active."""

    def __init__(self, config: ServerConfig) -> None:
        self._table = config.dashboard
        self._folder = Path(config.credentials)
        self._server: WebServer | None = None
        self._application: Application | None = None
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
        self._application = Application(behind, table.tls, table.grafana)
        self._server = WebServer(
            self._application.app, hosts, _context(certificate, key) if table.tls else None
        )
        await self._server.open(table.listen, "dashboard.listen")
        self.port = self._server.port
        scheme = "https" if table.tls else "http"
        log.info("the page is at %s://%s:%d", scheme, table.listen.rpartition(":")[0], self.port)

    async def close(self) -> None:
        """Ends the streams first: the web server would wait for them."""
        if self._server is None or self._application is None:
            return
        await self._application.close()
        await self._server.close()
        self._server = self._application = None


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
