"""Entries of the audit log, and their seals, can be taken out once a signed archive of them is on record."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

ARCHIVED = "(SELECT coalesce(max(last), 0) FROM archives)"
OUT_OF_ORDER = {
    "archives": f"NEW.first <> {ARCHIVED} + 1 OR NEW.last < NEW.first",
    "audit": f"NEW.sequence <> (SELECT coalesce(max(sequence), {ARCHIVED}) + 1 FROM audit)",
}
"""When a new row does not come behind the last one."""


def upgrade() -> None:
    op.create_table(
        "archives",
        sa.Column("first", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("last", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("first", name="pk_archives"),
    )
    make = _on_sqlite if op.get_bind().dialect.name == "sqlite" else _on_postgresql
    make()


def _on_sqlite() -> None:
    op.execute("DROP TRIGGER audit_in_order")
    for table, wrong in OUT_OF_ORDER.items():
        _trigger(f"{table}_in_order BEFORE INSERT ON {table} WHEN {wrong}", table)
    for change in ("UPDATE", "DELETE"):
        _trigger(f"archives_no_{change.lower()} BEFORE {change} ON archives", "archives")
    for table in ("audit", "seals"):
        op.execute(f"DROP TRIGGER {table}_no_delete")
        _trigger(f"{table}_no_delete BEFORE DELETE ON {table} WHEN OLD.sequence > {ARCHIVED}", table)


def _trigger(condition: str, table: str) -> None:
    op.execute(
        f"CREATE TRIGGER {condition} BEGIN SELECT RAISE(ABORT, 'the table {table} is append-only'); END"
    )


def _on_postgresql() -> None:
    for table, wrong in OUT_OF_ORDER.items():
        op.execute(
            f"CREATE OR REPLACE FUNCTION {table}_in_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {wrong} THEN RAISE EXCEPTION 'the table {table} is append-only'; END IF; RETURN NEW; END $$"
        )
    op.execute(
        "CREATE FUNCTION archives_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the table archives is append-only'; END $$"
    )
    _always("archives", "in_order", "BEFORE INSERT ON archives FOR EACH ROW", "archives_in_order")
    changes = "BEFORE UPDATE OR DELETE OR TRUNCATE ON archives FOR EACH STATEMENT"
    _always("archives", "append_only", changes, "archives_append_only")
    for table in ("audit", "seals"):
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
        changes = f"BEFORE UPDATE OR TRUNCATE ON {table} FOR EACH STATEMENT"
        _always(table, "append_only", changes, f"{table}_append_only")
        op.execute(
            f"CREATE FUNCTION {table}_kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF OLD.sequence > {ARCHIVED} THEN RAISE EXCEPTION 'the table {table} is append-only'; END IF; "
            "RETURN OLD; END $$"
        )
        _always(table, "kept", f"BEFORE DELETE ON {table} FOR EACH ROW", f"{table}_kept")


def _always(table: str, name: str, when: str, function: str) -> None:
    """A trigger that holds also for a session that plays a replica."""
    op.execute(f"CREATE TRIGGER {table}_{name} {when} EXECUTE FUNCTION {function}()")
    op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_{name}")
