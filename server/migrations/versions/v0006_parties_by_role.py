"""Parties are named by role and name; what a second person must confirm waits in a table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ROLES = ("agent", "viewer", "data-scientist", "operator", "admin")


def _strings(**lengths: int) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(length), nullable=False) for name, length in lengths.items()]


def upgrade() -> None:
    op.rename_table("revocations", "revocations_by_name")
    op.create_table(
        "revoked",
        *_strings(role=20, name=100, author=200),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("role", "name", name="pk_revoked"),
    )
    # A revocation of a name was one in every role.
    for role in ROLES:
        op.execute(
            f"INSERT INTO revoked SELECT '{role}', name, author, reason, time FROM revocations_by_name"
        )
    op.drop_table("revocations_by_name")
    op.create_table(
        "pending",
        *_strings(identifier=16, action=20, role=20, name=100, author=200),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("identifier", name="pk_pending"),
    )
