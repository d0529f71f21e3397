"""Reports of silos for operators: asked for, handed on when the silo is there, kept for who asked.

A silo's people decide. Requests are in the database: they outlast restarts and takeovers, and a silo that was
away is asked when it comes.
"""

from __future__ import annotations

import logging
import secrets

import grpc

from roundtable.server.auth.access import Refusal
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import ReportSaid
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.store.report_rows import (
    OPEN,
    ReportRow,
    ask_report,
    newest_report,
    settle_report,
)

log = logging.getLogger("roundtable.server.services.silo_reports")

OPEN_SECONDS = 7 * 86400.0
"""So long a request holds."""


class SiloReports:
    """One for a coordinator that is active."""

    def __init__(self, services: JobServices) -> None:
        self._services = services

    async def ask(self, silo: str, reason: str, author: str) -> ReportRow:
        """Asks a silo, or gives the request that it has still to answer. Refusal for one that never came."""
        now = self._services.clock()
        fresh = ReportRow(secrets.token_hex(8), silo, author, reason, now, now + OPEN_SECONDS)
        row = await self._services.database.write(lambda connection: ask_report(connection, fresh))
        if row is None:
            known = "`roundtable clients list` names those that have connected"
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no agent {silo!r} has ever connected; {known}")
        if row == fresh:
            log.info("%s asks for a report of %s", author, silo, extra={"site": silo})
            self._services.sessions.send(silo, to_agents.report_wish(row))
        return row

    async def newest(self, silo: str) -> ReportRow:
        """The silo's last request as it stands. Refusal where there is none."""
        row = await self._services.database.read(lambda connection: newest_report(connection, silo))
        if row is None:
            message = f"nobody has asked {silo!r} for a report of late"
            raise Refusal(grpc.StatusCode.NOT_FOUND, message)
        return row.at(self._services.clock())

    async def heard(self, silo: str, said: ReportSaid) -> bool:
        """Keeps what a silo says to a request; False where it was asked for none such."""
        status, now = {"sent": "answered"}.get(said.status, said.status), self._services.clock()
        known = await self._services.database.write(
            lambda c: settle_report(c, silo, said.request, status, said.reason, said.report, now)
        )
        if known and status not in OPEN:
            log.info("%s has answered the request for a report: %s", silo, status, extra={"site": silo})
        return known
