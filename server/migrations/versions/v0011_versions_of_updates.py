"""A silo is charged for each version of its update that has begun to arrive, also of one attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_STEP = ["job", "round", "attempt", "silo"]
_SHARED = sa.text("silo IN ('', '*')")


def upgrade() -> None:
    op.drop_index("uq_ledger_step", "ledger")
    op.create_index(
        "uq_ledger_step", "ledger", _STEP, unique=True, sqlite_where=_SHARED, postgresql_where=_SHARED
    )
