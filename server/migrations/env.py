"""How Alembic reaches the database: over the connection that the coordinator has opened."""

from __future__ import annotations

from alembic import context

from roundtable.server.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
