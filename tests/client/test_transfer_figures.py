"""What the way of each update took: in a round's record, in `job show`, in a simulation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from federation import NAMES, agents, federation_of, run_job, silo

from roundtable.cli.main import run as run_command
from roundtable.core import JobConfig, load_task
from roundtable.core.initial_model import initial_model
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(site.options.get("seed", 7))
        x = torch.randn(48, 4, generator=g)
        return (x[:32], x[:32, :3].argmax(1)), (x[32:], x[32:, :3].argmax(1))
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
TABLE = {
    "task": "toy",
    "rounds": 2,
    "cohort": {"size": 3},
    "evaluation": {"every": 0},
    "transfer": {"up": "topk(ratio=0.1) | int8", "down": "int4"},
}


async def test_bytes_seconds_and_error_of_each_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobConfig.model_validate(TABLE)
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        plain = 4 * model.layout.size
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, _ = await asyncio.to_thread(run_job, federation, job, model)
        assert status == "finished"
        address = ["--coordinator", federation[0], "--credentials", str(tmp_path / "operator")]
        await asyncio.to_thread(run_command, ["job", "show", job.title, "--json", *address])
    shown = json.loads(capsys.readouterr().out)
    assert shown["history"] == history
    for record in history:
        assert sorted(record["transfers"]) == sorted(NAMES)
        for transfer in record["transfers"].values():
            assert transfer["up_plain"] == plain
            assert 8 < transfer["up_plain"] / transfer["up"] < 40
            assert 0.1 < transfer["error"] < 1
            assert {"encoding_seconds", "decoding_seconds", "up_seconds", "down_seconds"} <= transfer.keys()
    first, second = (record["transfers"]["alder"] for record in history)
    assert first["down"] == first["down_plain"]
    assert 4 < second["down_plain"] / second["down"] < 8
    assert shown["transfer"]["updates"] == 6
    assert shown["transfer"]["up_ratio"] == pytest.approx(6 * plain / shown["transfer"]["up"])


def test_a_simulation_tells_the_same_without_seconds(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TASK)
    table = {**TABLE, "simulation": {"clients": 3}, "cohort": {"size": 3}}
    result = simulate(JobConfig.model_validate(table), load_task("toy.py", tmp_path))
    first, second = (record.transfers["client-0"] for record in result.history.records)
    assert 8 < first["up_plain"] / first["up"] < 40
    assert 0.1 < first["error"] < 1
    assert first["down"] == first["down_plain"] == 4 * result.model.layout.size
    assert 4 < second["down_plain"] / second["down"] < 8
    assert not any("seconds" in name for name in first)
    sizes = [sum(t["up"] for t in record.transfers.values()) for record in result.history.records]
    assert result.history["up_bytes"] == sizes
