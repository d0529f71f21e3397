"""What the coordinator remembers: SQLite by default, PostgreSQL by address."""

from roundtable.server.store.database import Database
from roundtable.server.store.jobs import FINAL, Transition
from roundtable.server.store.rows import ArtifactRow, ClientRow, EventRow, JobRow, LedgerRow, UpdateRow

__all__ = [
    "FINAL",
    "ArtifactRow",
    "ClientRow",
    "Database",
    "EventRow",
    "JobRow",
    "LedgerRow",
    "Transition",
    "UpdateRow",
]
