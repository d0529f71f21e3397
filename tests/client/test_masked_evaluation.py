"""Evaluation inside the secure sum, as a whole: a real coordinator, real agents over TLS, their processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation import NAMES, Federation, agents, federation_of, run_job, silo

from roundtable.client.agent import step_reports
from roundtable.client.agent.connection import Link
from roundtable.client.door import outgoing
from roundtable.client.training.evaluation import evaluate
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.core import JobConfig, Model, Site, load_task, save_model
from roundtable.core.initial_model import initial_model
from roundtable.core.observability.metric_sums import add_up, means
from roundtable.proto import agent_pb2

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
        x = torch.randn(48 + 8 * site.options["seed"], 4, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:32], y[:32]), (x[32:], y[32:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
JOB: dict[str, Any] = {
    "task": "toy",
    "rounds": 3,
    "cohort": {"size": 3},
    "algorithm": {"learning_rate": 0.3, "epochs": 2, "batch_size": 8},
    "evaluation": {"bounds": {"accuracy": 1.0, "loss": 20.0}},
    "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 10.0},
}


@pytest.fixture
async def federation(tmp_path: Path) -> AsyncIterator[Federation]:
    async with federation_of(tmp_path, TASK) as started:
        yield started


def measured(federation: Federation, model: Model) -> dict[str, tuple[float, int]]:
    """What the three silos' own evaluations of a model add up to."""
    task = load_task("toy.py", federation[1])
    parts = []
    for seed, name in enumerate(NAMES):
        _, test = task.data(Site(name, options={"seed": seed}))
        parts.append(evaluate(task, task.model(), test, model.layout, model.vector))
    return add_up(parts)


async def test_the_sum_tells_each_rounds_model_and_no_silo_its_own_figures(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send, header = Link.send, outgoing.upload_header

    def noted_send(link: Link, message: outgoing.FromAgent) -> None:
        sent.append(message)
        send(link, message)

    def noted_header(*given: Any, **named: Any) -> agent_pb2.UploadHeader:
        sent.append(header(*given, **named))
        return sent[-1]

    monkeypatch.setattr(Link, "send", noted_send)
    monkeypatch.setattr(outgoing, "upload_header", noted_header)
    # However short a step is, what it does is told.
    monkeypatch.setattr(step_reports, "_MOMENT_SECONDS", 0.0)
    job = JobConfig.model_validate(JOB)
    model = initial_model(job, load_task("toy.py", federation[1]))
    async with agents(*(silo(federation, name) for name in NAMES)):
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
        assert status == "finished"
        shorter = JobConfig.model_validate({**JOB, "rounds": 2, "seed": job.seed})
        status, _, before_the_last = await asyncio.to_thread(run_job, federation, shorter, model)
        assert status == "finished"
    records: list[Any] = list(history)
    assert [record["evaluation"] for record in records] == [{}] * 3
    for record, of in ((records[0], model), (records[2], before_the_last)):
        expected = measured(federation, of)
        assert record["before"].keys() == expected.keys()
        for name, (total, count) in record["before"].items():
            # Models of two runs differ by the random rounding of masked updates, the initial one does not.
            near = 3 * 20 * 2.0**-16 if of is model else 0.01 * count + 1
            assert (total, count) == (pytest.approx(expected[name][0], abs=near), 16 + 24 + 32)
    accuracy = [means(record["before"])["accuracy"] for record in records]
    assert accuracy[0] < accuracy[1] <= 1.0
    assert accuracy[0] < accuracy[2] <= 1.0
    assert means(measured(federation, final))["accuracy"] >= accuracy[0]
    # Whatever a silo has sent: keys and masked vectors; no count, loss or metric of its own.
    headers = [message for message in sent if isinstance(message, agent_pb2.UploadHeader)]
    assert len(headers) >= 15
    assert all((header.examples, len(header.metrics)) == (0, 0) for header in headers)
    messages = [message for message in sent if isinstance(message, agent_pb2.FromAgent)]
    kinds = {message.WhichOneof("message") for message in messages}
    assert {"progress", "reply"} <= kinds <= {"accepted", "progress", "reply", "heartbeat", "goodbye"}
    told = [message.progress for message in messages if message.HasField("progress")]
    assert {progress.activity for progress in told} >= {"evaluating", "training"}
    for progress in told:
        assert math.isnan(progress.loss)
        assert not progress.HasField("figures")
        assert progress.activity in ("downloading", "uploading") or progress.done == progress.total == 0


def test_a_round_made_again_measures_what_it_did_at_first(tmp_path: Path) -> None:
    """What a first attempt's training left at the silo is not in the model that the round begins with."""
    (tmp_path / "toy.py").write_text(TASK)
    job = JobConfig.model_validate({**JOB, "model": {"local": ["2.*"]}})
    model = initial_model(job, load_task("toy.py", tmp_path))
    save_model(tmp_path / "model.safetensors", model)
    executor = Executor(Settings("alder", str(tmp_path), str(tmp_path / "jobs"), "cpu", 1, {"seed": 0}))
    order = Order(
        job="job-1",
        round=1,
        phase="train",
        config=job.to_json(),
        task="toy.py",
        model=str(tmp_path / "model.safetensors"),
        layout=model.layout.fingerprint,
        output=str(tmp_path / "update"),
    )
    first = executor.evaluate(order)
    executor.train(order, lambda *seen: None)
    assert executor.evaluate(replace(order, attempt=2)) == first
    for later in (replace(order, round=2), replace(order, phase="evaluate")):
        assert executor.evaluate(replace(later, counted=(1, 1))) != first
        assert executor.evaluate(later) == first, "its update is in no model"
