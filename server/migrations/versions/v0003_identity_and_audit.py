"""Invitations, certificates, tokens, and the audit log that can only grow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

APPEND_ONLY = ("audit", "seals")


def _string(length: int, *names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(length), nullable=False) for name in names]


def _time(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def _integer(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def upgrade() -> None:
    _create_certificates()
    _create_tokens()
    _create_audit()
    for table in APPEND_ONLY:
        _refuse_changes(table)


def _create_certificates() -> None:
    op.create_table(
        "invitations",
        *_string(32, "identifier"),
        *_string(100, "silo"),
        *_string(64, "digest"),
        *_integer("uses", "used"),
        *_string(100, "author"),
        *_time("created", "expires"),
        sa.PrimaryKeyConstraint("identifier", name="pk_invitations"),
    )
    op.create_table(
        "certificates",
        *_string(40, "serial"),
        *_string(100, "name"),
        *_string(64, "key"),
        *_string(32, "invitation"),
        *_time("issued", "expires"),
        sa.PrimaryKeyConstraint("serial", name="pk_certificates"),
    )
    op.create_index("ix_certificates_name", "certificates", ["name"])
    op.create_table(
        "revocations",
        *_string(100, "name", "author"),
        sa.Column("reason", sa.Text(), nullable=False),
        *_time("time"),
        sa.PrimaryKeyConstraint("name", name="pk_revocations"),
    )


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        *_string(100, "name"),
        *_string(32, "identifier"),
        *_string(64, "digest"),
        *_string(20, "role"),
        *_string(100, "author"),
        *_time("created", "expires"),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tokens"),
        sa.UniqueConstraint("identifier", name="uq_tokens_identifier"),
    )


def _create_audit() -> None:
    op.create_table(
        "audit",
        *_integer("sequence"),
        *_time("time"),
        *_string(200, "actor"),
        *_string(50, "action"),
        *_string(200, "object"),
        sa.Column("detail", sa.Text(), nullable=False),
        *_string(64, "previous", "hash"),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit"),
    )
    op.create_index("ix_audit_action", "audit", ["action"])
    op.create_table(
        "seals",
        *_integer("sequence"),
        sa.Column("document", sa.Text(), nullable=False),
        *_time("time"),
        sa.PrimaryKeyConstraint("sequence", name="pk_seals"),
    )


def _refuse_changes(table: str) -> None:
    """A mistake is stopped here; whoever may drop a trigger is caught by the chain of hashes."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, 'the table {table} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE FUNCTION {table}_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'the table {table} is append-only'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_append_only()"
    )
