"""The role in which somebody submitted a job; empty for jobs of before, which then go by the name alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("submitter_role", sa.String(20), nullable=False, server_default=""))
