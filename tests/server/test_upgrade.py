"""A coordinator of this version starts on what each released version has left, and goes on with its jobs.

`databases/NAME/` holds a state folder: one job that is finished, one that waits for silos. A release adds its
own: `python tests/server/test_upgrade.py FOLDER NAME` writes it.
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

from roundtable.core.identity import create_ca, issue
from roundtable.server import ServerConfig, load_server_config

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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2]))
