"""Installed code of others at the coordinator: its state is kept with the models, its choice decides "
"cohorts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from installed import install
from safetensors.torch import load
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.server import Coordinator, ServerConfig

CODE = """
import torch
import roundtable as rt

class Heavy:
    def __init__(self, beta: float):
        self.beta = beta

    def init(self, columns):
        return rt.OptimizerState({"momentum": torch.zeros(columns)}, {"steps": 0})

    def apply(self, state, model, delta, step):
        assert state.scalars["steps"] == step
        momentum = self.beta * state.vectors["momentum"] + delta
        return rt.OptimizerState({"momentum": momentum}, {"steps": step + 1}), model + momentum

class Sliced(Heavy):
    elementwise = True

def last(names, size, chance, lookup, *, but: str = ""):
    return [name for name in names if name != but][-size:]

def none(names, size, chance, lookup):
    return []
"""
POINTS = {
    "roundtable.server_optimizers": {"heavy": "Heavy", "sliced": "Sliced"},
    "roundtable.selection_strategies": {"last": "last", "none": "none"},
}
JOB = """
[cohort]
size = 1
minimum = 1
strategy = "last"
parameters = { but = "cedar" }
[aggregation.server_optimizer]
name = "OPTIMIZER"
parameters = { beta = 0.5 }
[evaluation]
every = 0
"""
MASKED = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0'


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, "coordinators_parts", CODE, POINTS)


@pytest.mark.parametrize("optimizer", ["heavy", "sliced"])
async def test_state_and_choice_of_others_over_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path, optimizer: str
) -> None:
    """Ones from birch alone each round: the momentum is 1, 1.5, 1.75, and the model their sum."""
    config = settings()

    async def rounds(coordinator: Coordinator, job: str, until: int) -> tuple[str, Any, bytes]:
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with Operator(coordinator.port, certificates / "olga") as operator:
            async with agents[0], agents[1], agents[2]:
                job = job or (await operator.submit(JOB.replace("OPTIMIZER", optimizer), rounds=3)).id
                while len((await operator.job(job)).history) < until:
                    instruction = await agents[1].expect("instruction")
                    await agents[1].answer(instruction, torch.ones(4))
                    await operator.watch_for_round(job, instruction.step.round)
            detail = await operator.job(job)
            return job, detail, await operator.fetch(detail.job.model.digest)

    async with running(config) as coordinator:
        job, _, _ = await rounds(coordinator, "", 1)
    async with running(config) as coordinator:
        _, detail, model = await rounds(coordinator, job, 3)
    records = [json.loads(record) for record in detail.history]
    assert [record["cohort"] for record in records] == [["birch"]] * 3
    assert len({record["optimizer"] for record in records}) == 3
    assert torch.equal(load(model)["w"], torch.full((4,), 1 + 1.5 + 1.75))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"OPTIMIZER"', '"mine.py:Heavy"', "a job that was sent brings no code"),
        ("beta = 0.5", "gamma = 0.5", r"'heavy' .*has no parameter 'gamma'; it takes: beta"),
        ('"last"', '"mine.py:last"', "a job that was sent brings no code"),
        ("but =", "bud =", "has no parameter 'bud'; it takes: but"),
        ("[evaluation]", f"{MASKED}\n[evaluation]", "blind=True"),
    ],
)
async def test_what_a_coordinator_cannot_run_is_refused_at_submission(
    settings: Callable[..., ServerConfig], certificates: Path, old: str, new: str, message: str
) -> None:
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await operator.submit(JOB.replace(old, new).replace("OPTIMIZER", "heavy"))


async def test_a_strategy_that_cannot_choose_pauses_the_job_alone(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    text = JOB.replace("OPTIMIZER", "heavy").replace('"last"', '"none"').replace("parameters = { but", "# {")
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "birch"),
    ):
        job = await operator.submit(text)
        await operator.watch_until(job.id, "paused")
        assert "'none': 1 of 1 clients are wanted, and it gave 0" in (await operator.job(job.id)).job.reason
