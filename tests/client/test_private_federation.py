"""Silos that protect themselves, as a whole: real coordinator, real agents, a script, and their accounts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation import NAMES, Federation, agents, federation_of, run_job, silo

from roundtable.cli.main import run
from roundtable.client.join import join
from roundtable.client.policy.config import AgentConfig, PolicyTable
from roundtable.core import JobConfig, load_task
from roundtable.core.initial_model import initial_model
from roundtable.core.job_tables.cohort_table import CohortTable
from roundtable.privacy import compose
from roundtable.privacy.example_level import SiloAccount
from roundtable.privacy.statement import DRAWN_SILOS

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(48, 4, generator=g)
        return (x, x[:, :3].argmax(1)), None
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
BASE: dict[str, Any] = {
    "task": "toy",
    "cohort": {"size": 3, "minimum": 1},
    "algorithm": {"learning_rate": 0.3, "steps": 4, "batch_size": 8},
    "aggregation": {"weighting": "uniform"},
    "evaluation": {"every": 0},
}


@pytest.fixture
async def federation(tmp_path: Path) -> AsyncIterator[Federation]:
    async with federation_of(tmp_path, TASK) as started:
        yield started


def job_of(rounds: int, **privacy: Any) -> JobConfig:
    table = {"clip_norm": 1.0, "delta": 1e-3, "population": 40, **privacy}
    return JobConfig.model_validate({**BASE, "rounds": rounds, "privacy": table})


def account(config: AgentConfig, unit: str) -> SiloAccount:
    return SiloAccount.from_json((config.state / "privacy" / f"{unit}.json").read_text())


async def test_record_level_runs_until_each_silos_own_budget(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cedar lets its records spend half of what the job would: it leaves when that is spent, others go on."""
    _, folder = federation
    job = job_of(3, level="example", epsilon=4.0, noise_multiplier=1.0)
    model = initial_model(job, load_task("toy.py", folder))
    careful = replace(silo(federation, "cedar"), policy=PolicyTable(epsilon=2.0, delta=1e-3))
    silos = [silo(federation, name) for name in NAMES[:2]]
    async with agents(*silos, careful):
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert history[0]["contributors"] == sorted(NAMES)
    assert history[-1]["contributors"] == ["alder", "birch"]
    said = history[-1]["failures"]["cedar"]  # type: ignore[index]
    assert "privacy budget holds no further round" in said
    assert "epsilon" not in said, "the figures would tell how many records there are"
    assert all(record["training"] == {} for record in history), "no loss of a private training leaves a silo"
    kept = account(careful, "example")
    assert kept.spent().epsilon <= 2.0 < account(silos[0], "example").spent().epsilon <= 4.0
    one = kept.entries[0].charge
    assert (one.rate, one.steps, one.noise_multiplier) == (8 / 48, 4, 1.0)
    assert compose([one.repeated_by(len(kept.entries) + 1)], 1e-3) > 2.0
    assert "any one record" in final.metadata["privacy"]
    capsys.readouterr()
    path = careful.state / "privacy" / "example.json"
    assert await asyncio.to_thread(run, ["privacy", "show", "--account", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"] == pytest.approx(kept.spent().epsilon)
    assert "any one record held by a participating organisation" in shown["statement"]


@pytest.mark.slow
async def test_drawn_silos_are_charged_for_the_rounds_in_which_they_train(federation: Federation) -> None:
    """Whole rounds: the draw makes none of them cheaper, and who is not drawn spends nothing."""
    _, folder = federation
    plain = job_of(3, level="example", noise_multiplier=1.0)
    drawn = CohortTable(strategy="poisson", probability=0.5)
    job = plain.model_copy(update={"cohort": drawn})
    model = initial_model(job, load_task("toy.py", folder))
    silos = [silo(federation, name) for name in NAMES]
    async with agents(*silos):
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    for config, name in zip(silos, NAMES, strict=True):
        trained = [record["round"] for record in history if name in record["contributors"]]  # type: ignore[operator]
        kept = account(config, "example").entries if trained else ()
        assert [entry.round for entry in kept] == trained
        assert {(entry.charge.rate, entry.charge.steps) for entry in kept} <= {(8 / 48, 4)}
    assert DRAWN_SILOS in final.metadata["privacy"]


@pytest.mark.slow
async def test_silos_with_noise_of_their_own_and_a_script_among_them(federation: Federation) -> None:
    _, folder = federation
    job = job_of(2, level="client_local", noise_multiplier=30.0)
    model = initial_model(job, load_task("toy.py", folder))

    def script() -> None:
        for round in join(silo(federation, "cedar")):
            round.submit(round.arrays, examples=48, metrics={"loss": 0.5})

    async with agents(*(silo(federation, name) for name in NAMES[:2])):
        running = asyncio.create_task(asyncio.to_thread(script))
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
        await running
    assert status == "finished"
    assert [record["contributors"] for record in history] == [sorted(NAMES)] * 2
    assert all(record["training"] == {} for record in history)
    # Two rounds of three silos' noise of 30 on each coordinate, over a mean of three.
    spread = float((final.vector - model.vector).std())
    assert spread == pytest.approx(30.0 * (2 / 3) ** 0.5, rel=0.35)
    for name in NAMES:
        assert len(account(silo(federation, name), "client").entries) == 2
    assert "Each silo adds the noise before anything leaves it" in final.metadata["privacy"]
