"""Whether a coordinator could use its database: the tables' version, the right to write, the clock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url

from roundtable.core.errors import StorageError
from roundtable.doctor.inquiries import Check
from roundtable.doctor.machine_checks import clock, folder_writable
from roundtable.server.store import Database
from roundtable.server.store.migrate import newest_revision, revision_of
from roundtable.server.store.tables import metadata

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


def database(address: str) -> Iterator[Check]:
    """StorageError where it cannot be reached or written, or a newer version has written it."""
    embedded = address.startswith("sqlite")
    if embedded:
        file = Path(address.removeprefix("sqlite:///"))
        folder = folder_writable("database", file.parent, "database in coordinator.toml")
        if not file.exists() or folder.state == "fail":
            absent = Check("database", "ok", f"{file} will be made at the first start")
            yield folder if folder.state == "fail" else absent
            return
    with closing(Database.connect(address)) as opened:
        before, user = time.time(), make_url(opened.address).username or "USER"
        if not embedded:
            with opened.transaction() as connection:
                lacking = _not_ours(connection)
            if lacking:
                grant = f"GRANT {_RIGHTS} ON ALL TABLES IN SCHEMA public TO {user}"
                message = f"{opened.url}: user {user} may not read and write {', '.join(lacking)}"
                yield Check("database", "fail", message, f'as their owner, `psql ADDRESS -c "{grant}"`')
                return
        opened.look()
        took = time.time() - before
        if refused := _refused_writing(opened):
            grant = f"GRANT CREATE ON SCHEMA public TO {user}"
            remedy = f'as its owner, `psql ADDRESS -c "{grant}"`'
            if embedded:
                remedy = "`df` and `ls -l` of its folder show why"
            yield Check("database", "fail", f"nothing can be written: {refused}", remedy)
            return
        with opened.transaction() as connection:
            level, newest = revision_of(connection), newest_revision(connection)
        where = f"{file} can be read" if embedded else f"{opened.url} answers in {took:.2f} s"
        yield Check("database", "ok", f"{where} and written; {_told(level, newest)}")
        if not embedded:
            with opened.transaction() as connection:
                theirs = sa.select(sa.func.extract("epoch", sa.func.clock_timestamp()))
                apart = float(connection.execute(theirs).scalar_one()) - time.time()
            yield clock(apart, "the database")


def _told(level: str | None, newest: str) -> str:
    if level is None:
        return f"it is empty, its tables (level {newest}) will be made at the first start"
    if level == newest:
        return f"its tables are at level {level}, as this version needs"
    return f"its tables are at level {level}, and the next start brings them to {newest}: back it up before"


def _not_ours(connection: Connection) -> list[str]:
    """The tables that are there and that this user may not read and write."""
    present = set(sa.inspect(connection).get_table_names())
    allowed = sa.text("SELECT has_table_privilege(:table, :right)")
    return [
        name
        for name in sorted(present & {"alembic_version", *metadata.tables})
        if not all(
            connection.execute(allowed, {"table": f'"{name}"', "right": right}).scalar_one()
            for right in _RIGHTS.split(", ")
        )
    ]


class _Undone(Exception):
    """Ends a transaction of which nothing shall stay."""


def _refused_writing(opened: Database) -> str:
    """Makes a table as an upgrade would, writes a row, takes both back. Why it may not, or nothing."""
    probe = sa.Table(f"doctor_{secrets.token_hex(6)}", sa.MetaData(), sa.Column("value", sa.Integer))
    try:
        with suppress(_Undone), opened.transaction() as connection:
            probe.create(connection)
            connection.execute(sa.insert(probe).values(value=1))
            raise _Undone
    except StorageError as error:
        return str(error)
    return ""
