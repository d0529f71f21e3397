"""The coordinator's gate as a whole: who is let in, through which door, and what is written about it.

`listen` wants a client certificate of the authority, and so does `operators`, if operators have an address of
their own; `enrolment`, if it is set, wants none, for silos that were invited and operators with a token. All
speak TLS 1.3 (`secure_port.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from roundtable.core.errors import IdentityError, StorageError
from roundtable.core.identity.credentials import (
    IDENTITY_KEY,
    Credentials,
    SiloIdentity,
    load_silo_identity,
)
from roundtable.proto import administration_pb2_grpc
from roundtable.server.auth.access import Access
from roundtable.server.auth.audit import AuditLog
from roundtable.server.auth.enrolment import Enrolment
from roundtable.server.auth.page_sessions import PageSessions
from roundtable.server.auth.principals import Principals
from roundtable.server.auth.provenance import Provenance
from roundtable.server.auth.quotas import Quota, Quotas
from roundtable.server.auth.rate_limit import Lockouts
from roundtable.server.auth.relayed import RelayedSilos
from roundtable.server.auth.second_person import SecondPerson
from roundtable.server.config import ServerConfig
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.incidents import quota_incident
from roundtable.server.operations.lasting_work import lasting
from roundtable.server.services.administration import AdministrationService
from roundtable.server.services.enrolling import EnrolmentService
from roundtable.server.services.secure_port import open_port
from roundtable.server.store import Database
from roundtable.server.store.audit_archives import Load
from roundtable.server.versions import versions

log = logging.getLogger("roundtable.server.services.security")

REFRESH_SECONDS = 5.0


class Security:
    """Built once the database is open; `start` before the first call, `stop` after the last."""

    def __init__(
        self,
        config: ServerConfig,
        database: Database,
        credentials: Credentials,
        alerts: Alerts,
        load: Load,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._alerts = alerts
        self._clock = clock
        self._credentials = credentials
        self._folder = Path(config.credentials)
        self.identity = _identity(self._folder)
        self.principals = Principals(database, self._folder, credentials.ca, clock, config.oidc)
        self.audit = AuditLog(database, self.identity, load, clock)
        self._lockouts = Lockouts(time.monotonic)
        self.quotas = Quotas(config.quotas, time.monotonic, self._exceeded)
        self.relayed = RelayedSilos(self.principals, credentials.ca)
        self.access = Access(
            self.principals, self.audit, self._lockouts, self.quotas, time.monotonic, self.relayed
        )
        self.enrolment = Enrolment(
            database,
            self._folder,
            credentials.ca,
            self.principals,
            self.quotas,
            clock,
            config.certificate_days,
        )
        self.pages = PageSessions(database, clock, config.dashboard, self.principals.is_listed)
        provenance = Provenance(database, self.identity, versions()["roundtable"], clock)
        self.administration = AdministrationService(
            database,
            self.enrolment,
            self.principals,
            self.access,
            self.audit,
            provenance,
            SecondPerson(database, clock),
            self.pages,
            config.dashboard,
            clock,
        )
        self.enrolment_port = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads what is revoked, and notes the start; IdentityError for a list that cannot be trusted."""
        await self.principals.refresh()
        await self.audit.begin(self._credentials.name, versions())
        loop = asyncio.get_running_loop()
        work = {"signing the audit log": self.audit.watch, "the watch of revocations": self._refresh}
        self._tasks = [loop.create_task(lasting(name, part)) for name, part in work.items()]

    async def stop(self) -> None:
        """Signs the audit log up to its end."""
        for task in self._tasks:
            task.cancel()
        try:
            await self.audit.seal()
        except StorageError as error:
            log.error("the audit log is not signed up to its end: %s", error)

    def add_services(self, server: grpc.aio.Server) -> None:
        """Adds enrolment and administration to a server."""
        service = EnrolmentService(self.enrolment, self._lockouts, self._credentials.ca)
        administration_pb2_grpc.add_EnrolmentServicer_to_server(service, server)
        administration_pb2_grpc.add_AdministrationServicer_to_server(self.administration, server)

    def listen(self, server: grpc.aio.Server, address: str, key: str = "listen") -> int:
        """Opens an address for client certificates, of the setting `key`; returns its port.

        ResourceError if it is taken.
        """
        return open_port(server, address, self._folder, self._credentials, key)

    def listen_without_certificates(self, server: grpc.aio.Server) -> None:
        """Opens the address for invitations and tokens, if there is one. ResourceError if it is taken."""
        if address := self._config.enrolment:
            self.enrolment_port = open_port(
                server, address, self._folder, self._credentials, "enrolment", certificates=False
            )

    def _exceeded(self, who: str, quota: Quota, problem: str) -> None:
        """Tells operators of a caller that wants more than it may have; once an hour for each."""
        log.warning("%s is refused: %s", who, problem)
        self._alerts.tell(quota_incident(quota), f"{who} is refused: {problem}", self._clock())

    async def _refresh(self) -> None:
        """Notices what another process has revoked; a list that is wrong changes nothing."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.principals.refresh()
            except (IdentityError, StorageError) as error:
                log.error("what is revoked could not be read anew: %s", error)


def _identity(folder: Path) -> SiloIdentity | None:
    """The coordinator's signing identity; older credentials have none."""
    if not (folder / IDENTITY_KEY).exists():
        log.warning("receipts and the audit log are not signed: %s has no %s", folder, IDENTITY_KEY)
        return None
    return load_silo_identity(folder)
