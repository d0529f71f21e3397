"""`up = "auto"` with a real coordinator and agents, one of them over a slow line; and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation import agents, federation_of, run_job, silo
from shaped_line import shaped_line

from roundtable.client.agent.step_worker import told_encoding
from roundtable.client.failures import WorkFailed
from roundtable.core import JobConfig, load_task, parse_job
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.engine import make_plan
from roundtable.operator import OperatorClient
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8192), nn.ReLU(), nn.Linear(8192, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(site.options.get("seed", 7))
        x = torch.randn(48, 4, generator=g)
        return (x[:32], x[:32, :3].argmax(1)), (x[32:], x[32:, :3].argmax(1))
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
SPARSE = "topk(ratio=0.05) | int8"
TABLE: dict[str, Any] = {
    "task": "toy",
    "rounds": 3,
    "cohort": {"size": 2},
    "algorithm": {"learning_rate": 0.05},
    "evaluation": {"every": 0},
    "transfer": {"up": "auto", "down": "int4"},
}


async def test_a_slow_line_gets_a_shorter_encoding_and_an_event_says_why(tmp_path: Path) -> None:
    job = JobConfig.model_validate(TABLE | {"evaluation": {"every": 3}})
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        host, port = federation[0].split(":")
        async with shaped_line(int(port), rate=60e3, round_trip=0.05) as slow:
            far = replace(silo(federation, "alder"), coordinator=f"{host}:{slow}")
            async with agents(far, silo(federation, "birch")):
                status, history, _ = await asyncio.to_thread(run_job, federation, job, model)
        assert status == "finished"
        measured: Any = history[-1]["client_metrics"]
        assert {*measured} == {"alder", "birch"}, "nothing of an evaluation is encoded"

        def seen() -> tuple[Any, list[Any]]:
            with OperatorClient(federation[0], tmp_path / "operator") as operator:
                events = [event for update in operator.watch(job.title) for event in update.events]
                return {client.name: client.link for client in operator.clients()}, events

        links, events = await asyncio.to_thread(seen)
    encodings = [record["transfers"]["alder"]["encoding"] for record in history]
    assert encodings == ["int8", "int8", SPARSE]
    assert 20e3 < links["alder"].up < 70e3
    assert 20e3 < links["alder"].down < 70e3
    assert links["alder"].round_trip > 0.05
    (changed,) = [event for event in events if event.kind == "encoding_changed" and event.client == "alder"]
    assert "MB/s up" in changed.message


def test_a_simulation_chooses_by_the_devices_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TASK)
    devices = {"upload": 2e4, "latency": 0.1}
    table = {**TABLE, "rounds": 4, "simulation": {"clients": 2, "devices": devices}}
    task = load_task("toy.py", tmp_path)
    whole = simulate(JobConfig.model_validate(table), task, run_dir=tmp_path / "whole")
    used = [record.transfers["client-0"]["encoding"] for record in whole.history.records]
    assert used == ["int8", "int8", SPARSE, SPARSE]
    times = [record.ended - record.started for record in whole.history.records]
    assert times[3] < times[0] / 4
    again = simulate(JobConfig.model_validate(table), task)
    assert again.history.records == whole.history.records
    with pytest.raises(ConfigError, match="encodings are chosen by how fast clients upload"):
        simulate(JobConfig.model_validate({**table, "simulation": {"clients": 2}}), task)


def test_what_does_not_go_together_is_refused_before_round_1() -> None:
    text = 'task = "t"\n[transfer]\nup = "auto"\n'
    private = (
        text + '[privacy]\nlevel = "client_local"\nclip_norm = 1.0\nnoise_multiplier = 1.0\ndelta = 1e-3\n'
    )
    with pytest.raises(PrivacyError, match="no proof covers that"):
        make_plan(parse_job(private + '[aggregation]\nweighting = "uniform"\n'), 10)
    masked = (
        text
        + '[evaluation]\nevery = 0\n[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n'
    )
    with pytest.raises(PrivacyError, match="masked updates have all one form"):
        make_plan(parse_job(masked), 10)
    scaffold = '[algorithm]\nname = "scaffold"\nsteps = 5\n[aggregation]\nweighting = "uniform"\n'
    with pytest.raises(ConfigError, match="that encoding changes it too much"):
        make_plan(parse_job(text + scaffold), 10)


def test_a_silo_takes_no_encoding_that_the_job_does_not_allow() -> None:
    job = parse_job('task = "t"\n[transfer]\nup = "auto"\n')
    assert told_encoding(job, SPARSE) == SPARSE
    for told in ("int2", "", "topk(ratio=0.05)"):
        with pytest.raises(WorkFailed, match=r"which the job's \[transfer\] does not"):
            told_encoding(job, told)
    with pytest.raises(WorkFailed):
        told_encoding(parse_job('task = "t"'), "int8")
