"""Rows of the audit log and its seals can only be added behind the last one.

SQLite's `INSERT OR REPLACE` deletes the row that stands in its way without calling a DELETE trigger, unless
the connection has asked for recursive triggers. So inserts are looked at as well. In PostgreSQL the triggers
also hold for a session that plays a replica.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

FOLLOWS = {
    "audit": "NEW.sequence <> (SELECT coalesce(max(sequence), 0) + 1 FROM audit)",
    "seals": "NEW.sequence <= (SELECT coalesce(max(sequence), 0) FROM seals)",
}
"""When a new row does not come behind the last one: entries are numbered without gaps, seals are not."""


def upgrade() -> None:
    for table, out_of_place in FOLLOWS.items():
        message = f"the table {table} is append-only"
        if op.get_bind().dialect.name == "sqlite":
            op.execute(
                f"CREATE TRIGGER {table}_in_order BEFORE INSERT ON {table} WHEN {out_of_place} "
                f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
            )
            continue
        op.execute(
            f"CREATE FUNCTION {table}_in_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {out_of_place} THEN RAISE EXCEPTION '{message}'; END IF; RETURN NEW; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_in_order BEFORE INSERT ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION {table}_in_order()"
        )
        for trigger in ("append_only", "in_order"):
            op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_{trigger}")
