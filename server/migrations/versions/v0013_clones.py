"""Who came last with a silo's key and was not its installation, for the silo's own agent to be told."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("installations") as table:
        table.add_column(sa.Column("clone_time", sa.Double(), nullable=False, server_default="0"))
        table.add_column(sa.Column("clone_address", sa.Text(), nullable=False, server_default=""))
