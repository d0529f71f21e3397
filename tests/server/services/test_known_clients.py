"""What the coordinator knows of a silo over all jobs, and what a new job's selection gets of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.server import ServerConfig
from roundtable.server.store.agent_rows import stored_clients

ONE = "[cohort]\nsize = 1\n[evaluation]\nevery = 0\n"
PRIVATE = """[cohort]
minimum = 1
[evaluation]
every = 0
[aggregation]
weighting = "uniform"
[privacy]
level = "client_local"
clip_norm = 1.0
delta = 1e-5
noise_multiplier = 1.0
"""


@pytest.mark.parametrize(("table", "examples"), [(ONE, 10), (PRIVATE, None)])
async def test_a_later_job_knows_of_earlier_ones_after_a_restart_too(
    settings: Callable[..., ServerConfig], certificates: Path, table: str, examples: int | None
) -> None:
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        job = await olga.submit(table, rounds=1)
        await alder.answer(await alder.expect("instruction"), torch.ones(4))
        await olga.watch_until(job.id, "finished")
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        stored = await coordinator._database.read(lambda c: stored_clients(c, ["alder"])["alder"])
        assert (stored.selected, stored.completed, stored.examples) == (1, 1, examples)
        job = await olga.submit(ONE, rounds=1, request="r2")
        while (said := await alder.next()) and said.WhichOneof("message") == "withdraw":
            """Of the first job, which has ended, if that could not be said before."""
        assert said.instruction.step.job == job.id
        runner = coordinator.jobs.runner(job.id)
        assert runner is not None
        info = runner._engine.population.info("alder")
        assert (info.selected, info.completed, info.examples) == (1, 1, examples)
