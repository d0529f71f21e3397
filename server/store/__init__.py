"""What the coordinator remembers: SQLite by default, PostgreSQL by address."""

from roundtable.server.store.database import Database
from roundtable.server.store.jobs import FINAL, Transition
from roundtable.server.store.rows import (
    AgentRow,
    ArtifactRow,
    Capacity,
    EventRow,
    JobRow,
    Learnt,
    LedgerRow,
    RelayedSumRow,
    UpdateRow,
)

__all__ = [
    "FINAL",
    "AgentRow",
    "ArtifactRow",
    "Capacity",
    "Database",
    "EventRow",
    "JobRow",
    "Learnt",
    "LedgerRow",
    "RelayedSumRow",
    "Transition",
    "UpdateRow",
]
