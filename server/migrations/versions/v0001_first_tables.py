"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _string(length: int, *names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(length), nullable=False) for name in names]


def _integer(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def _time(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def upgrade() -> None:
    _create_coordinator_and_clients()
    _create_jobs()
    _create_history()
    _create_updates()
    _create_ledger()


def _create_coordinator_and_clients() -> None:
    op.create_table(
        "coordinator",
        *_integer("id"),
        *_string(64, "identity"),
        *_time("created"),
        sa.PrimaryKeyConstraint("id", name="pk_coordinator"),
    )
    op.create_table(
        "clients",
        *_string(100, "name"),
        *_string(50, "version"),
        *_text("tasks", "metadata", "devices"),
        *_time("first_seen", "last_seen"),
        *_integer("selected", "completed"),
        sa.Column("examples", sa.BigInteger()),
        sa.PrimaryKeyConstraint("name", name="pk_clients"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        *_string(32, "id"),
        *_string(100, "name"),
        *_string(200, "request_id"),
        *_string(100, "submitter"),
        *_text("config"),
        *_string(64, "initial_model", "model", "optimizer"),
        *_string(20, "status"),
        *_text("reason"),
        *_integer("rounds", "rounds_done"),
        *_text("snapshot"),
        *_integer("version"),
        *_string(32, "writer"),
        *_time("submitted", "updated"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("request_id", name="uq_jobs_request_id"),
    )
    op.create_index("ix_jobs_name", "jobs", ["name"])


def _create_history() -> None:
    op.create_table(
        "events",
        *_string(32, "job"),
        *_integer("sequence"),
        *_time("time"),
        *_string(50, "kind"),
        *_integer("round", "attempt"),
        *_string(100, "client"),
        *_text("message", "detail"),
        sa.PrimaryKeyConstraint("job", "sequence", name="pk_events"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_events_job"),
    )
    op.create_table(
        "rounds",
        *_string(32, "job"),
        *_integer("round", "attempt"),
        *_string(64, "model", "optimizer"),
        *_text("record"),
        *_time("committed"),
        sa.PrimaryKeyConstraint("job", "round", name="pk_rounds"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_rounds_job"),
    )


def _create_updates() -> None:
    op.create_table(
        "updates",
        *_string(32, "job"),
        *_integer("round", "attempt"),
        *_string(100, "client"),
        *_string(64, "digest"),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("examples", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double()),
        *_text("metrics"),
        *_string(20, "receipt"),
        *_text("reason"),
        *_time("received"),
        sa.PrimaryKeyConstraint("job", "round", "attempt", "client", name="pk_updates"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_updates_job"),
    )
    op.create_index("ix_updates_digest", "updates", ["digest"])
    op.create_table(
        "artifacts",
        *_string(64, "digest"),
        sa.Column("size", sa.BigInteger(), nullable=False),
        *_string(20, "kind"),
        *_time("created"),
        sa.PrimaryKeyConstraint("digest", name="pk_artifacts"),
    )


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("id", sa.Integer(), primary_key=True),
        *_string(200, "population"),
        *_string(100, "silo"),
        *_string(32, "job"),
        *_integer("round", "attempt"),
        *_text("charge"),
        sa.Column("released", sa.Boolean(), nullable=False),
        *_time("time"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_ledger_job"),
    )
    op.create_index("ix_ledger_account", "ledger", ["population", "silo"])
    op.create_index("uq_ledger_step", "ledger", ["job", "round", "attempt", "silo"], unique=True)


def downgrade() -> None:
    for table in ("ledger", "artifacts", "updates", "rounds", "events", "jobs", "clients", "coordinator"):
        op.drop_table(table)
