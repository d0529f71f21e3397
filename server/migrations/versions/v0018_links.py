"""How fast the line to each silo was, as the coordinator has measured it over rounds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("clients", sa.Column("link", sa.Text(), nullable=False, server_default=""))
