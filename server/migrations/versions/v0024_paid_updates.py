"""Which update a silo's own charge in the privacy ledger has paid for: the same one pays once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("digest", sa.String(64), nullable=False, server_default=""))
