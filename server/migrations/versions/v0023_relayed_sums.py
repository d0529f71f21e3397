"""Sums that relays have sent in the place of their silos' updates, each with the relay's signed statement."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "relayed_sums",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("member", sa.String(100), nullable=False),
        sa.Column("relay", sa.String(100), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("received", sa.Double(), nullable=False),
        sa.Column("statement", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "round", "attempt", "member", name="pk_relayed_sums"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_relayed_sums_job"),
    )
    op.create_index("ix_relayed_sums_digest", "relayed_sums", ["digest"])
