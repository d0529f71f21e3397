"""Backups of a coordinator that works: whole, or not there at all; a second one copies only what is new."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from postgresql import PostgreSQL
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.errors import StorageError
from roundtable.proto import agent_pb2
from roundtable.server import ServerConfig
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_drill import rehearse

Settings = Callable[..., ServerConfig]
TABLE = "[cohort]\nsize = 1\n[evaluation]\nevery = 0"
JOBS = {"sqlite": 28, "postgresql": 4}


async def train(agent: ScriptedAgent) -> None:
    """Answers every instruction with an update that there was never before."""
    while (message := await agent.call.read()) is not grpc.aio.EOF:
        if message.WhichOneof("message") == "instruction":
            await agent.answer(message.instruction, torch.rand(4))


async def jobs_go_on(operator: Operator, jobs: list[Any], rounds: int) -> None:
    """Waits until each of them has committed so many rounds more."""
    details = await asyncio.gather(*(operator.job(job.id) for job in jobs))
    following = (operator.watch_for_round(d.job.id, d.job.rounds_done + rounds) for d in details)
    await asyncio.gather(*following)


@pytest.mark.parametrize("kind", JOBS)
async def test_nothing_that_a_backup_has_seen_is_deleted_before_it_is_copied(
    settings: Settings, certificates: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """All jobs go on by two rounds between the look at the database and the first copy."""
    config, loop = settings(keep_models=1), asyncio.get_running_loop()
    if kind == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        config = settings(keep_models=1, database=server.fresh())
    async with running(config) as coordinator:
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in ("alder", "birch")]
        for agent in agents:
            agent.capacity = agent_pb2.Capacity(jobs=JOBS[kind])
        async with Operator(coordinator.port, certificates / "olga") as operator, agents[0], agents[1]:
            jobs = [
                await operator.submit(TABLE, 100_000, torch.full((4,), float(number)), f"r{number}")
                for number in range(JOBS[kind])
            ]
            training = [asyncio.create_task(train(agent)) for agent in agents]
            await jobs_go_on(operator, jobs, 1)

            def tell(word: str) -> None:
                if word.startswith("artifact 1 "):
                    asyncio.run_coroutine_threadsafe(jobs_go_on(operator, jobs, 2), loop).result()

            made = await asyncio.to_thread(back_up, config, tmp_path / "backup", tell=tell)
            for task in training:
                task.cancel()
    assert made.copied == len(made.manifest["artifacts"]) > JOBS[kind]
    found = await asyncio.to_thread(rehearse, config, tmp_path / "backup")
    assert found.jobs == {"running": JOBS[kind]}


@pytest.fixture
async def stopped(settings: Settings, certificates: Path) -> ServerConfig:
    """A coordinator that has had a job, and stands still."""
    config = settings()
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        await operator.submit(TABLE)
        await operator.put(b"once more" * 1000)
    return config


@pytest.mark.parametrize("end", ["damaged", "missing", "Ctrl-C"])
def test_a_backup_that_fails_leaves_no_folder(stopped: ServerConfig, tmp_path: Path, end: str) -> None:
    artifact = next(Path(stopped.artifacts).glob("objects/*/*"))
    if end == "damaged":
        artifact.write_bytes(b"x" + artifact.read_bytes()[1:])
    if end == "missing":
        artifact.unlink()

    def tell(word: str) -> None:
        if end == "Ctrl-C" and word.startswith("artifact 2 "):
            raise KeyboardInterrupt

    error = KeyboardInterrupt if end == "Ctrl-C" else StorageError
    with pytest.raises(error, match=None if end == "Ctrl-C" else f"artifact {artifact.name} .*is {end}"):
        back_up(stopped, tmp_path / "backups" / "monday", tell=tell)
    assert list((tmp_path / "backups").iterdir()) == []


def test_two_backups_into_one_folder(stopped: ServerConfig, tmp_path: Path) -> None:
    folder = tmp_path / "monday"
    left = tmp_path / ".monday.partial"
    (left / "tables").mkdir(parents=True)
    (left / "tables" / "stale.jsonl").touch()

    def tell(word: str) -> None:
        if word.startswith("artifact 1 "):
            assert not folder.exists()
            with pytest.raises(StorageError, match="another backup is being written into"):
                back_up(stopped, folder)

    back_up(stopped, folder, tell=tell)
    assert not left.exists()
    assert not (folder / "tables" / "stale.jsonl").exists()
    before = sorted(folder.rglob("*"))
    with pytest.raises(StorageError, match=r"is not empty.*--since"):
        back_up(stopped, folder)
    assert sorted(folder.rglob("*")) == before


async def test_a_second_backup_copies_what_is_new_and_what_is_damaged_in_the_first(
    stopped: ServerConfig, certificates: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "monday", tmp_path / "tuesday"
    one = back_up(stopped, first)
    async with running(stopped) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        await operator.submit(TABLE, vector=torch.ones(4), request="r2")
    rotten = one.manifest["artifacts"][0]
    path = first / "objects" / rotten[:2] / rotten
    path.write_bytes(b"x" + path.read_bytes()[1:])
    two = back_up(stopped, second, since=first)
    shared = set(one.manifest["artifacts"]) - {rotten}
    assert (two.shared, two.again, two.copied) == (
        len(shared),
        1,
        len(two.manifest["artifacts"]) - len(shared),
    )
    assert shared == {p.name for p in second.glob("objects/*/*") if p.stat().st_nlink == 2}
    assert two.shared_bytes == sum(p.stat().st_size for p in second.glob("objects/*/*") if p.name in shared)
    rehearse(stopped, second)
    with pytest.raises(StorageError, match=f"{rotten} was changed"):
        rehearse(stopped, first)
    (first / "manifest.json").write_text(json.dumps({"artifacts": []}))
    with pytest.raises(StorageError, match="is not signed"):
        back_up(stopped, tmp_path / "wednesday", since=first)
