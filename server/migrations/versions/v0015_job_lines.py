"""The log of each job: the coordinator's own lines, and those that silos share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_lines",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("silo", sa.String(100), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.String(10), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("received", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job", "sequence", name="pk_job_lines"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_job_lines_job"),
    )
    op.create_index("uq_job_lines_number", "job_lines", ["job", "silo", "number"], unique=True)
