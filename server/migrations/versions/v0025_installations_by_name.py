"""All keys of a silo are looked up together: an installation has its connection's and its identity's."""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_installations_name", "installations", ["name"])
