"""What jobs remember of clients: rows of their own, in the place of a part of the job's snapshot."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_JOBS = sa.table("jobs", sa.column("id"), sa.column("snapshot"))


def upgrade() -> None:
    op.create_table(
        "job_clients",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("client", sa.String(100), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "client", name="pk_job_clients"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_job_clients_job"),
    )
    connection = op.get_bind()
    rows = sa.table("job_clients", sa.column("job"), sa.column("client"), sa.column("record"))
    for job, stored in connection.execute(sa.select(_JOBS.c.id, _JOBS.c.snapshot)).all():
        snapshot = json.loads(stored)
        clients = snapshot.get("engine", {}).pop("clients", {})
        if clients:
            moved = [
                {"job": job, "client": name, "record": json.dumps(each)} for name, each in clients.items()
            ]
            connection.execute(sa.insert(rows), moved)
            changed = sa.update(_JOBS).where(_JOBS.c.id == job).values(snapshot=json.dumps(snapshot))
            connection.execute(changed)
