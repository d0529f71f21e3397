"""Which silos are drained, and which ones operators have disabled, and why."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("drained", "disabled"):
        op.add_column("clients", sa.Column(name, sa.Text(), nullable=False, server_default=""))
