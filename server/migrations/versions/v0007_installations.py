"""Which installation of a silo's agent each of its keys belongs to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "installations",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("installation", sa.String(64), nullable=False),
        sa.Column("bound", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_installations"),
    )
