"""Backups: made of a coordinator that runs, and worth what restoring them gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from postgresql import PostgreSQL
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.errors import StorageError
from roundtable.proto import agent_pb2, common_pb2
from roundtable.server import ServerConfig
from roundtable.server.storage.backup import back_up, restore

Settings = Callable[..., ServerConfig]
TABLE = "[cohort]\nsize = 2\nminimum = 2\n[evaluation]\nevery = 0"


async def half_a_job(config: ServerConfig, certificates: Path, backup: Path) -> tuple[str, Any]:
    """Round 1 is committed; of round 2 alder's update is there at the backup. Then birch's comes."""
    async with running(config) as coordinator:
        alder, birch = (ScriptedAgent(coordinator.port, certificates / name) for name in ("alder", "birch"))
        async with Operator(coordinator.port, certificates / "olga") as operator, alder, birch:
            job = await operator.submit(TABLE, rounds=2)
            for agent in (alder, birch):
                await agent.answer(await agent.expect("instruction"), torch.full((4,), 2.0))
            second = [await agent.expect("instruction") for agent in (alder, birch)]
            await alder.answer(second[0], torch.full((4,), 3.0))
            await asyncio.to_thread(back_up, config, backup)
            await birch.answer(second[1], torch.full((4,), 5.0))
            await operator.watch_until(job.id, "finished")
            return job, await operator.job(job.id)


@pytest.mark.parametrize("kinds", [("sqlite", "sqlite"), ("sqlite", "postgresql"), ("postgresql", "sqlite")])
async def test_a_restored_coordinator_goes_on_where_the_backup_was_made(
    settings: Settings,
    certificates: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kinds: tuple[str, str],
) -> None:
    def at(name: str, kind: str) -> ServerConfig:
        if kind == "sqlite":
            return settings(state=str(tmp_path / name))
        server: PostgreSQL = request.getfixturevalue("postgresql")
        return settings(state=str(tmp_path / name), database=server.fresh())

    job, before = await half_a_job(at("old", kinds[0]), certificates, tmp_path / "backup")
    config = at("new", kinds[1])
    await asyncio.to_thread(restore, config, tmp_path / "backup")
    async with running(config) as coordinator:
        alder, birch = (ScriptedAgent(coordinator.port, certificates / name) for name in ("alder", "birch"))
        async with Operator(coordinator.port, certificates / "olga") as operator, alder, birch:
            detail = await operator.job(job.id)
            assert (detail.job.status, detail.job.rounds_done, detail.round) == ("running", 1, 2)
            # What alder delivered before the backup was made is kept.
            await birch.answer(await birch.expect("instruction"), torch.full((4,), 5.0))
            await operator.watch_until(job.id, "finished")
            after = await operator.job(job.id)
    assert after.job.model.digest == before.job.model.digest
    assert json.loads(after.history[1])["contributors"] == ["alder", "birch"]


async def test_a_backup_older_than_what_an_agent_has_seen_is_refused_until_the_loss_is_accepted(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    old = settings(state=str(tmp_path / "old"))
    async with (
        running(old) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=3)
        first = await alder.expect("instruction")
        await asyncio.to_thread(back_up, old, tmp_path / "backup")
        await alder.answer(first, torch.ones(4))
        seen = (await alder.expect("instruction")).step
        assert (seen.round, job.id) == (2, seen.job)
        identity = alder.welcome.coordinator
    new = settings(state=str(tmp_path / "new"))
    await asyncio.to_thread(restore, new, tmp_path / "backup")
    async with running(new) as coordinator:
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        answer = await agent.connect(coordinator=identity, seen=[seen])
        assert "is older than what this silo has seen" in answer.refused.reason
        assert "--new-identity" in answer.refused.reason
        await agent.close()
        known = common_pb2.Step(job=seen.job, round=1, attempt=1)
        async with ScriptedAgent(coordinator.port, certificates / "birch") as other:
            assert other.welcome.coordinator == identity
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        assert (await agent.connect(coordinator=identity, seen=[known])).HasField("welcome")
        await agent.close()
        strange = common_pb2.Step(job="0" * 12, round=1, attempt=1)
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        assert (await agent.connect(coordinator=identity, seen=[strange])).HasField("refused")
        await agent.close()
    accepted = settings(state=str(tmp_path / "accepted"))
    await asyncio.to_thread(restore, accepted, tmp_path / "backup", new_identity=True)
    async with running(accepted) as coordinator:
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        answer = await agent.connect(coordinator=identity, seen=[seen])
        assert answer.HasField("welcome")
        assert answer.welcome.coordinator != identity
        assert isinstance(await agent.expect("instruction"), agent_pb2.Instruction)
        await agent.close()


@pytest.mark.parametrize("damage", ["artifact", "table", "manifest", "half", "format", "newer"])
async def test_a_backup_that_is_not_whole_is_refused_before_anything_is_written(
    settings: Settings, certificates: Path, tmp_path: Path, damage: str
) -> None:
    backup = tmp_path / "backup"
    config = settings(state=str(tmp_path / "old"))
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        await operator.submit(TABLE)
        await asyncio.to_thread(back_up, config, backup)
    words = spoil(backup, damage)
    new = settings(state=str(tmp_path / "new"))
    with pytest.raises(StorageError, match=words):
        restore(new, backup)
    assert not list((tmp_path / "new").glob("artifacts/objects/*/*"))
    with pytest.raises(StorageError, match="is not empty"):
        back_up(config, backup)


def spoil(backup: Path, damage: str) -> str:
    """Damages a backup; the words of the complaint."""
    manifest = backup / "manifest.json"
    if damage == "artifact":
        path = next(backup.glob("objects/*/*"))
        path.write_bytes(b"x" + path.read_bytes()[1:])
        return "the backup is damaged"
    if damage == "table":
        (backup / "tables" / "jobs.jsonl").write_text("")
        return r"the backup is damaged: jobs\.jsonl"
    if damage == "manifest":
        manifest.write_text("{")
        return "is damaged"
    if damage == "half":
        manifest.unlink()
        return "holds no whole backup"
    found = json.loads(manifest.read_text())
    found |= {"format": 2} if damage == "format" else {"revision": "9999"}
    manifest.write_text(json.dumps(found))
    return "has format 2" if damage == "format" else "belong to a newer version"


async def test_neither_a_used_database_nor_used_artifacts_are_overwritten(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    config = settings(state=str(tmp_path / "old"))
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        await operator.submit(TABLE)
        await asyncio.to_thread(back_up, config, tmp_path / "backup")
    with pytest.raises(StorageError, match="holds artifacts already"):
        restore(config, tmp_path / "backup")
    with pytest.raises(StorageError, match="is not empty"):
        restore(settings(state=str(tmp_path / "old"), artifacts=str(tmp_path / "a")), tmp_path / "backup")
