"""`[standardise]` over real silos: found by a masked analysis, and stored with the job for all of them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federation import NAMES, Federation, agents, federation_of, silo

from roundtable.cli.main import run as run_command
from roundtable.client.policy.config import AgentConfig
from roundtable.core.config import job_from_json, load_job
from roundtable.core.errors import ConfigError
from roundtable.core.models import save_model
from roundtable.operator import OperatorClient
from roundtable.preparation import prepare_job
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn

import roundtable as rt


class Toy(rt.Task):
    def model(self):
        return nn.Linear(1, 1)

    def data(self, site):
        ages = torch.tensor(site.table("people").matrix(["age"]), dtype=torch.float32)
        return (ages, ages), None

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
JOB = """
task = "toy"
name = "ages"
rounds = 1
cohort.size = 3
evaluation.every = 0
[privacy]
level = "none"
secure_aggregation = true
clip_norm = 10.0
[standardise]
table = "people"
columns.age = { least = 0, most = 120 }
"""


def with_people(federation: Federation, name: str) -> AgentConfig:
    config = silo(federation, name)
    table = {"people": {"file": f"{name}.csv"}}
    return replace(config, tasks={**config.tasks, "analysis": "analysis"}, data=table)


def wait_for_silos(address: str, folder: Path) -> None:
    """Until the coordinator knows all."""
    with OperatorClient(address, folder / "operator") as operator:
        while sum(client.online for client in operator.clients()) < len(NAMES):
            time.sleep(0.01)


def told_by(address: str, folder: Path, job: str) -> tuple[str, str]:
    with OperatorClient(address, folder / "operator") as operator:
        detail = operator.job(job)
    return detail.job.status, detail.job_config


def submit_bare(address: str, folder: Path) -> None:
    """A job whose figures nobody has found."""
    with OperatorClient(address, folder / "operator") as operator:
        bare = prepare_job(load_job(folder / "job.toml"), folder)
        save_model(folder / "initial.safetensors", bare.model)
        operator.submit(bare.job, folder / "initial.safetensors")


async def test_silos_are_asked_once_and_the_job_keeps_what_they_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(NAMES):
        ages = np.random.default_rng(number).integers(20, 90, 40).tolist()
        (tmp_path / f"{name}.csv").write_text("\n".join(map(str, ["age", *ages])) + "\n")
    (tmp_path / "job.toml").write_text(JOB)
    files = [{"file": str(tmp_path / f"{name}.csv")} for name in NAMES]
    async with federation_of(tmp_path, TASK) as (address, folder):
        here = simulate(
            load_job(tmp_path / "job.toml"),
            folder=folder,
            overrides={
                "simulation.data.people": files,
                "simulation.clients": 3,
                "simulation.masking": "fast",
            },
            progress=False,
        )
        command = ["job", "", "--coordinator", address, "--credentials", str(folder / "operator"), "--json"]
        async with agents(*(with_people((address, folder), name) for name in NAMES)):
            await asyncio.to_thread(wait_for_silos, address, folder)
            command[1:2] = ["submit", str(tmp_path / "job.toml"), "--watch"]
            assert await asyncio.to_thread(run_command, command) == 0, capsys.readouterr().err
            status, config = await asyncio.to_thread(told_by, address, folder, "ages")
            capsys.readouterr()
            command[1:4] = ["apply", "-f", str(tmp_path / "job.toml")]
            assert await asyncio.to_thread(run_command, command) == 0
            assert json.loads(capsys.readouterr().out)["action"] == "unchanged"
            _, analysis = await asyncio.to_thread(told_by, address, folder, "people.standardise")
            with pytest.raises(ConfigError, match="'age' has no mean and sd yet"):
                await asyncio.to_thread(submit_bare, address, folder)
    stored, found = job_from_json(config).standardise, here.job.standardise
    assert status == "finished"
    assert stored is not None
    assert found is not None
    assert stored.columns == found.columns
    assert stored.source.startswith("analysis ")
    assert json.loads(analysis)["privacy"]["secure_aggregation"] is True
