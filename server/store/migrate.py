"""Brings a database's tables to this version's, or says why that cannot be."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError


def alembic_config(connection: Connection) -> Config:
    """Alembic's configuration: the scripts inside the package, and this connection."""
    config = Config()
    config.set_main_option("script_location", "roundtable.server:migrations")
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection, url: str) -> None:
    """Applies missing migrations; StorageError, before anything is written, for a newer database."""
    if not is_current(connection, url):
        command.upgrade(alembic_config(connection), "head")


def revision_of(connection: Connection) -> str | None:
    """The version of the tables; None where there are none."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision(connection: Connection) -> str:
    """The version of the tables that this software needs."""
    return str(ScriptDirectory.from_config(alembic_config(connection)).get_current_head())


def make(connection: Connection, revision: str) -> None:
    """Makes the tables of one version in an empty database. StorageError for a version that is newer."""
    config = alembic_config(connection)
    if revision not in {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}:
        raise StorageError(
            f"tables of version {revision} belong to a newer version of Roundtable: use that version"
        )
    command.upgrade(config, revision)


def is_current(connection: Connection, url: str) -> bool:
    """Whether nothing is missing. StorageError for a database that a newer version has written."""
    scripts = ScriptDirectory.from_config(alembic_config(connection))
    current = MigrationContext.configure(connection).get_current_revision()
    if current == scripts.get_current_head():
        return True
    if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
        raise StorageError(
            f"database {url} was written by a newer version of Roundtable (its tables are at {current}, "
            f"this version knows {scripts.get_current_head()}): run that version, or restore an older backup"
        )
    return False
