"""The best model of each job that keeps it, with its round and its value of the job's metric."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("best_model", sa.String(64), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("best_round", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("best_value", sa.Double(), nullable=False, server_default="0"))
