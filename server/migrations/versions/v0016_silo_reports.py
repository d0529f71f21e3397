"""Reports that operators ask silos for, and what silos answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "reports",
        sa.Column("request", sa.String(32), nullable=False),
        sa.Column("silo", sa.String(100), nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("answered", sa.Double(), nullable=False),
        sa.Column("said", sa.Text(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("request", name="pk_reports"),
    )
    op.create_index("ix_reports_silo", "reports", ["silo"])
