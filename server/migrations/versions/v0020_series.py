"""Jobs that are repeated: which run of its series a job is, and whether another is to follow it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("run", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("repeats", sa.Integer(), nullable=False, server_default="0"))
