"""A job's `[tracking]` at the coordinator: written below its own folder, over a restart, and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.core.config import parse_job
from roundtable.proto import agent_pb2
from roundtable.proto.common_pb2 import StepFigures
from roundtable.server import ServerConfig
from roundtable.server.operations.publication import Publication

TABLE = '[cohort]\nsize = 1\n[evaluation]\nevery = 0\n[tracking]\ntensorboard = "runs"'


async def test_each_round_is_told_once_over_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings()
    job = None
    for again in (False, True):
        async with (
            running(config) as coordinator,
            Operator(coordinator.port, certificates / "olga") as operator,
            ScriptedAgent(coordinator.port, certificates / AGENTS[0]) as agent,
        ):
            job = job or await operator.submit(TABLE, rounds=4)
            asked = await agent.expect("instruction")
            for _ in range(2):
                for seconds, held in ((0.5, 9), (1.0, 7)):
                    figures = StepFigures(step=1, steps=2, seconds=seconds, memory_bytes=held)
                    said = agent_pb2.Progress(step=asked.step, done=1, total=2, loss=seconds, figures=figures)
                    await agent.say(progress=said)
                await agent.answer(asked, torch.ones(4), loss=0.5)
                asked = (await agent.next()).instruction
            if again:
                await operator.watch_until(job.id, "finished")
    for thread in threading.enumerate():
        if thread.name.startswith("tracking-"):
            await asyncio.to_thread(thread.join, 30)
    shown = EventAccumulator(str(Path(config.state) / "tracking" / "runs" / f"t-{job.id}"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("train_loss")] == [
        (number, 0.5) for number in (1, 2, 3, 4)
    ]
    assert [event.value for event in shown.Scalars("clients")] == [1.0] * 4
    for name, value in (("seconds", 0.75), ("loss", 0.75), ("memory_bytes", 9.0)):
        assert [event.value for event in shown.Scalars(f"{AGENTS[0]}/step_{name}")] == [value] * 4


@pytest.mark.parametrize(
    ("level", "named"), [("none", {"north/step_loss": 1.0}), ("client_local", {}), ("client", {})]
)
def test_steps_are_told_where_nothing_of_them_is_private(level: str, named: dict[str, float]) -> None:
    more = "" if level == "none" else "clip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 2.0\n"
    privacy = parse_job(f'task = "t"\n[privacy]\nlevel = "{level}"\n{more}').privacy
    assert Publication(privacy).steps({"north": {"loss": 1.0}}).value == named


@pytest.mark.parametrize("place", ["/tmp/x", "../x", "http://inside.example"])
async def test_a_place_outside_is_refused(
    settings: Callable[..., ServerConfig], certificates: Path, place: str
) -> None:
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await operator.submit(f'[tracking]\ntensorboard = "{place}"')
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "only below its own folder" in str(refused.value.details())
