"""A coordinator of this version starts on what each older version has left, and goes on with its jobs.

`databases/NAME/` holds a state folder: one job that is finished, one that waits for silos. Each release adds
its own, named like its tag: `python tests/server/store/test_upgrade.py FOLDER NAME` with tests/kit in
`PYTHONPATH` writes it. `0002` and `0006` were written by the code of their times, whose newest migration had
that number, so that all later ones run over rows that they did not expect.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.core.errors import StorageError
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.proto import PROTOCOL_VERSION
from roundtable.server import Coordinator, ServerConfig, load_server_config
from roundtable.server.store import Database
from roundtable.server.store.job_silo_rows import clients_of
from roundtable.server.store.migrate import make, revision_of

ROOT = Path(__file__).resolve().parents[3]
DATABASES = Path(__file__).with_name("databases")
RELEASES = sorted(path.name for path in DATABASES.iterdir() if path.is_dir())
LEVELS = sorted(file.stem[1:5] for file in (ROOT / "server/migrations/versions").glob("v*_*.py"))
STARTED = LEVELS[::6]
"""Levels that are tried in PostgreSQL too, and from which a coordinator is started: the slow ones."""


@pytest.mark.parametrize("release", RELEASES)
async def test_a_coordinator_goes_on_with_what_a_release_has_left(
    release: str, settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    shutil.copytree(DATABASES / release, config.state)
    await goes_on(config, certificates)


@pytest.mark.parametrize("release", ["0002", "0006"])
def test_what_jobs_remembered_of_clients_is_in_rows_of_its_own(release: str, tmp_path: Path) -> None:
    file = tmp_path / "coordinator.db"
    shutil.copy(DATABASES / release / "coordinator.db", file)
    with sqlite3.connect(file) as older:
        stored = older.execute("SELECT id, snapshot FROM jobs").fetchall()
    remembered = {job: json.loads(snapshot)["engine"].get("clients", {}) for job, snapshot in stored}
    assert any(remembered.values())
    again = Database.open(f"sqlite:///{file}")
    with again.snapshot() as connection:
        assert {job: clients_of(connection, job) for job in remembered} == remembered
    again.close()


def test_each_release_has_left_a_database() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without a history knows no tags")
    done = subprocess.run(
        ["git", "tag", "--list", "v[0-9]*"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    released = {tag[1:] for tag in done.stdout.split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)}
    assert released <= set(RELEASES)


@pytest.fixture(scope="module")
def left_today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder as this version leaves it."""
    folder = tmp_path_factory.mktemp("today")
    asyncio.run(write(folder, "state"))
    return folder / "state"


@pytest.mark.parametrize(
    ("level", "database"),
    [*((level, "sqlite") for level in LEVELS), *((level, "postgresql") for level in STARTED)],
    indirect=["database"],
)
async def test_rows_in_tables_of_each_level_are_kept_and_their_jobs_go_on(
    level: str, database: str, left_today: Path, settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings(database=database)
    shutil.copytree(left_today / "artifacts", Path(config.state, "artifacts"))
    rows = rows_of(left_today / "coordinator.db")
    older = Database.connect(database)
    with older.transaction() as connection:
        make(connection, level)
        put = fill(connection, rows)
    older.close()
    assert {"jobs", "rounds", "updates", "events", "artifacts", "ledger"} <= put.keys()
    again = Database.open(database)
    with again.snapshot() as connection:
        for table, filled in put.items():
            assert fetched(connection, table, filled) == filled, table
    again.close()
    if level in STARTED:
        await goes_on(config, certificates)


async def test_a_migration_that_fails_leaves_everything_as_it_was(database: str) -> None:
    """Here the fourth, after two that went well: its table is there already."""
    older = Database.connect(database)
    with older.transaction() as connection:
        make(connection, "0001")
        connection.execute(sa.text("CREATE TABLE lease (id INTEGER)"))
        before = set(sa.inspect(connection).get_table_names())
    with pytest.raises(StorageError, match="lease"):
        Database.open(database)
    with older.transaction() as connection:
        assert set(sa.inspect(connection).get_table_names()) == before
        assert revision_of(connection) == "0001"
    older.close()


def rows_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows by table, in the order in which they were written."""
    connection = sqlite3.connect(f"file:{file}?immutable=1", uri=True)
    connection.row_factory = sqlite3.Row
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {
        name: [dict(row) for row in connection.execute(f"SELECT * FROM {name} ORDER BY rowid")]
        for name in names
        if name != "alembic_version"
    }
    connection.close()
    # One that no job of these has: nobody there was promised privacy.
    found["ledger"] = [
        {
            "id": 1,
            "population": "p",
            "silo": "",
            "job": found["jobs"][0]["id"],
            "round": 1,
            "attempt": 1,
            "charge": "{}",
            "released": True,
            "time": 1.0,
        }
    ]
    return found


def fill(connection: sa.Connection, rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Puts into the tables that are there what they have places for; what was put, by table."""
    found = sa.MetaData()
    found.reflect(connection)
    put = {}
    for table in found.sorted_tables:
        names = [column.name for column in table.columns]
        some = [{key: row[key] for key in names if key in row} for row in rows.get(table.name, [])]
        if some:
            if table.name == "lease":
                # A migration has made its only row.
                connection.execute(sa.delete(table))
            connection.execute(sa.insert(table), some)
            put[table.name] = some
    return put


def fetched(connection: sa.Connection, name: str, filled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same columns of the table as it is now."""
    table = sa.Table(name, sa.MetaData(), autoload_with=connection)
    columns = [table.c[key] for key in filled[0]]
    found = [dict(row._mapping) for row in connection.execute(sa.select(*columns))]
    return sorted(found, key=lambda row: filled.index(row) if row in filled else -1)


async def goes_on(config: ServerConfig, certificates: Path) -> None:
    """Starts a coordinator there: the finished job is as it was, the open one is finished by silos."""
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        jobs = {job.name: job for job in await coordinator.jobs.rows()}
        assert jobs["done"].status == "finished"
        assert jobs["open"].status in ("waiting", "running")
        history = (await operator.job(jobs["done"].id)).history
        assert len(history) == 1
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            work = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in agents]
            await operator.watch_until(jobs["open"].id, "finished")
            for task in work:
                task.cancel()


def test_older_tables_are_really_older() -> None:
    """Otherwise no migration would be tried here."""
    connection = sqlite3.connect(f"file:{DATABASES / '0002' / 'coordinator.db'}?immutable=1", uri=True)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    connection.close()
    assert revision == "0002"
    assert not tables & {"lease", "audit"}


async def test_an_agent_of_the_next_version_works(coordinator: Coordinator, certificates: Path) -> None:
    """What counts is the protocol's number; the release is only told to people."""
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    first = await agent.connect(version="0.2.0")
    assert first.WhichOneof("message") == "welcome"
    await agent.close()


@pytest.mark.parametrize("apart", [-1, 1])
async def test_another_protocol_is_refused_in_one_sentence(
    apart: int, coordinator: Coordinator, certificates: Path
) -> None:
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    first = await agent.connect(version="0.2.0", protocol=PROTOCOL_VERSION + apart)
    assert first.WhichOneof("message") == "refused"
    reason = first.refused.reason
    assert f"the agent 0.2.0 speaks protocol {PROTOCOL_VERSION + apart}" in reason
    assert f"speaks protocol {PROTOCOL_VERSION}: install the same version on both" in reason
    await agent.close()


async def write(folder: Path, name: str) -> None:
    """Makes a state folder as this version leaves it."""
    create_ca(folder / "ca")
    hosts = ("localhost", "127.0.0.1")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", hosts=hosts)
    for silo in AGENTS:
        issue(folder / "ca", silo, "agent", folder / silo)
    issue(folder / "ca", "olga", "operator", folder / "olga")
    values = {"listen": "127.0.0.1:0", "state": str(folder / name)}
    config = load_server_config(None, {**values, "credentials": str(folder / "coordinator")})
    async with running(config) as coordinator, Operator(coordinator.port, folder / "olga") as operator:
        agents = [ScriptedAgent(coordinator.port, folder / silo) for silo in AGENTS]
        async with agents[0], agents[1], agents[2]:
            work = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in agents]
            job = await operator.submit("name = 'done'\n[cohort]\nsize = 3".replace("'", '"'), rounds=1)
            await operator.watch_until(job.id, "finished")
            for task in work:
                task.cancel()
        text = 'name = "open"\n[cohort]\nsize = 3\nminimum = 3'
        await operator.submit(text, rounds=1, request="r2")
    connection = sqlite3.connect(folder / name / "coordinator.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    for left in ("*.lock", "lock", "*-wal", "*-shm"):
        for path in (folder / name).rglob(left):
            path.unlink()


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2]))
