"""A coordinator of this version starts on what each older version has left, and goes on with its jobs.

`databases/NAME/` holds a state folder: one job that is finished, one that waits for silos. A release adds its
own: `PYTHONPATH=tests/kit python tests/server/store/test_upgrade.py FOLDER NAME` writes it. `0002` was
written by the code of its time, whose newest migration had that number, so that all later ones run over rows
that they did not expect; its jobs' configurations are as the first release writes them.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.proto import PROTOCOL_VERSION
from roundtable.server import Coordinator, ServerConfig, load_server_config

DATABASES = Path(__file__).with_name("databases")
RELEASES = sorted(path.name for path in DATABASES.iterdir() if path.is_dir())


@pytest.mark.parametrize("release", RELEASES)
async def test_a_coordinator_goes_on_with_what_a_release_has_left(
    release: str, settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    shutil.copytree(DATABASES / release, config.state)
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
