"""Reports that operators have asked silos for, and what silos answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from roundtable.core.evidence.audit_log import entry
from roundtable.server.store import tables
from roundtable.server.store.audit import append

OPEN = ("waiting", "shown")


@dataclass(frozen=True)
class ReportRow:
    """A request. `status`: waiting for the silo, shown to its people, denied, answered, or expired by now.

    `said` is why it was denied; `report` the JSON that was sent.
    """

    request: str
    silo: str
    author: str
    reason: str
    created: float
    expires: float
    status: str = "waiting"
    answered: float = 0.0
    said: str = ""
    report: str = ""

    def at(self, now: float) -> ReportRow:
        """As it stands at this time."""
        late = self.status in OPEN and self.expires <= now
        return replace(self, status="expired") if late else self


def ask_report(connection: Connection, fresh: ReportRow) -> ReportRow | None:
    """Stores a request, unless one of the silo is open: then that one. None for a silo that never came."""
    known = sa.select(tables.clients.c.name).where(tables.clients.c.name == fresh.silo)
    if connection.execute(known).first() is None:
        return None
    if (found := open_report(connection, fresh.silo, fresh.created)) is not None:
        return found
    connection.execute(sa.insert(tables.reports).values(asdict(fresh)))
    return fresh


def open_report(connection: Connection, silo: str, now: float) -> ReportRow | None:
    """The request that the silo has still to answer."""
    found = newest_report(connection, silo)
    return found if found is not None and found.at(now).status in OPEN else None


def open_reports(connection: Connection, silos: Mapping[str, float]) -> dict[str, ReportRow]:
    """The requests that silos have still to answer, each at its own time; none for those that have none."""
    table = tables.reports.c
    query = sa.select(tables.reports).where(table.silo.in_(list(silos))).order_by(table.created)
    newest = {row.silo: row for each in connection.execute(query) if (row := _row(each)) is not None}
    return {silo: row for silo, row in newest.items() if row.at(silos[silo]).status in OPEN}


def newest_report(connection: Connection, silo: str) -> ReportRow | None:
    """The silo's last request, over or not."""
    table = tables.reports.c
    query = sa.select(tables.reports).where(table.silo == silo).order_by(table.created.desc()).limit(1)
    return _row(connection.execute(query).first())


def settle_report(
    connection: Connection, silo: str, request: str, status: str, said: str, report: str, now: float
) -> bool:
    """Stores what a silo says to a request; False where it was asked for none such.

    The first answer holds; one that comes too late is dropped. The audit log is told of an answer.
    """
    table = tables.reports.c
    query = sa.select(tables.reports).where(table.request == request, table.silo == silo)
    row = _row(connection.execute(query).first())
    if row is None:
        return False
    if row.at(now).status not in OPEN:
        return True
    values: dict[str, Any] = {"status": status}
    if status not in OPEN:
        values |= {"answered": now, "said": said, "report": report}
        detail = {"silo": silo, "bytes": len(report.encode()), "reason": said}
        append(connection, entry(now, silo, f"report_{status}", request, detail))
    connection.execute(sa.update(tables.reports).where(table.request == request).values(values))
    return True


def retire_reports(connection: Connection, before: float) -> None:
    """Deletes requests, and reports, that are older."""
    connection.execute(sa.delete(tables.reports).where(tables.reports.c.created < before))


def _row(row: Row[Any] | None) -> ReportRow | None:
    return ReportRow(**row._mapping) if row is not None else None
