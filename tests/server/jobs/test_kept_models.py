"""Models that a job has kept: the best through crashes, retention, backup and restore; those of every "
"k-th round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.cli.main import run
from roundtable.core import open_model
from roundtable.server import ServerConfig
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_drill import rehearse
from roundtable.server.storage.backup_restore import restore

Settings = Callable[..., ServerConfig]
JOB = """
[cohort]
size = 1
[stop]
metric = "loss"
patience = 4
[keep]
every = 3
"""
LOSSES = [0.5, 0.25, 0.75, 0.25, 0.5, 0.75]


async def rounds(agent: ScriptedAgent, first: int, last: int) -> None:
    """Answers the rounds up to `last`; the model of a round is the sum of all rounds' numbers."""
    for number in range(first, last + 1):
        await agent.answer(await agent.expect("instruction"), torch.full((4,), float(number)))
        await agent.evaluate(await agent.expect("instruction"), loss=(10 * LOSSES[number - 1], 10))


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
async def test_the_best_model_outlives_restarts_retention_and_a_restored_backup(
    settings: Settings,
    certificates: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    server = request.getfixturevalue("postgresql") if kind == "postgresql" else None
    config = settings(keep_models=1, **({"database": server.fresh()} if server else {}))

    async def fetched(port: int, *words: str, code: int = 0) -> Any:
        place = ["--coordinator", f"localhost:{port}", "--credentials", str(certificates / "olga")]
        file = str(tmp_path / "m.safetensors")
        capsys.readouterr()
        done = await asyncio.to_thread(run, ["job", "model", "t", "-o", file, "--json", *words, *place])
        out, err = capsys.readouterr()
        assert done == code, err
        if code:
            return err
        told = json.loads(out)
        return told["round"], told["best"], float(open_model(Path(file)).vector[0])

    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = (await operator.submit(JOB, rounds=9)).id
        assert "no round of job" in await fetched(coordinator.port, "--best", code=2)
        await rounds(agent, 1, 4)
        await operator.watch_for_round(job, 4)
        assert await fetched(coordinator.port) == (2, True, 3.0)
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        await rounds(agent, 5, 6)
        await operator.watch_until(job, "finished")
        told = (await operator.job(job)).job
        assert (told.best.round, told.best.value, told.rounds_done) == (2, 0.25, 6)
        assert "the best model is that of round 2: loss 0.25, measured by 1 client" in told.reason
    async with running(config) as coordinator:
        await coordinator.jobs._services.retention.sweep(1e12)
        port = coordinator.port
        assert await fetched(port) == await fetched(port, "--best") == (2, True, 3.0)
        assert await fetched(port, "--last") == (6, False, 21.0)
        assert await fetched(port, "--round", "3") == (3, False, 6.0)
        assert await fetched(port, "--round", "0") == (0, False, 0.0)
        assert "older models are not kept" in await fetched(port, "--round", "4", code=2)
        assert "has no round 7 yet" in await fetched(port, "--round", "7", code=2)
        assert "choose one" in await fetched(port, "--round", "3", "--best", code=2)
    await asyncio.to_thread(back_up, config, tmp_path / "backup")
    assert (await asyncio.to_thread(rehearse, config, tmp_path / "backup")).jobs
    again = settings(
        state=str(tmp_path / "again"), keep_models=1, **({"database": server.fresh()} if server else {})
    )
    await asyncio.to_thread(restore, again, tmp_path / "backup")
    async with running(again) as coordinator:
        assert await fetched(coordinator.port) == (2, True, 3.0)


async def test_what_a_coordinator_does_not_keep_is_refused_at_once(
    settings: Settings, certificates: Path
) -> None:
    async with (
        running(settings(keep_wanted=4)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        await operator.submit("[keep]\nevery = 2", rounds=9)
        with pytest.raises(Exception, match=r"would keep 9 models; .*at most 4 .*set keep.every = 3 or more"):
            await operator.submit("[keep]\nevery = 1", rounds=9, request="r2")
        with pytest.raises(Exception, match=r"keep.best: best by what"):
            await operator.submit("[keep]\nbest = true", rounds=9, request="r3")
