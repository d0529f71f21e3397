"""What silos train jobs on, as they say it: ranks, devices, the plan of a cluster."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_setups",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("client", sa.String(100), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("setup", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "client", "number", name="pk_job_setups"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_job_setups_job"),
    )
