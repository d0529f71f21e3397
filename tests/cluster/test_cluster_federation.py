"""A federation of two clusters and a plain silo: coordinator, mTLS, secure aggregation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.config import AgentConfig
from roundtable.cluster.agent.cluster_trainer import ClusterTrainer
from roundtable.core import JobConfig, Model, load_task, open_model, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.initial_model import initial_model
from roundtable.operator import OperatorClient
from roundtable.proto.common_pb2 import StepFigures
from roundtable.server import Coordinator, ServerConfig

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(48, 4, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:32], y[:32]), (x[32:], y[32:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
CLUSTERS: dict[str, ClusterTable | None] = {
    "alder": ClusterTable.model_validate(
        {"devices": 2, "backend": "gloo", "strategy": {"data_parallel": "zero3", "fsdp": 2}}
    ),
    "birch": ClusterTable.model_validate({"devices": 2, "backend": "gloo", "strategy": {"pp": 2}}),
    "cedar": None,
}


@pytest.fixture
async def federation(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A coordinator's address, and a folder with credentials and the task."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "coordinator", "coordinator", tmp_path / "coordinator", hosts=("127.0.0.1",))
    issue(tmp_path / "ca", "operator", "operator", tmp_path / "operator")
    for name in CLUSTERS:
        issue(tmp_path / "ca", name, "agent", tmp_path / name)
    (tmp_path / "toy.py").write_text(TASK)
    config = ServerConfig(
        listen="127.0.0.1:0",
        state=str(tmp_path / "server"),
        database=f"sqlite:///{tmp_path / 'coordinator.db'}",
        artifacts=str(tmp_path / "artifacts"),
        credentials=str(tmp_path / "coordinator"),
    )
    coordinator = Coordinator(config)
    await coordinator.start()
    yield f"127.0.0.1:{coordinator.port}", tmp_path
    await coordinator.stop()


@asynccontextmanager
async def agents(address: str, folder: Path) -> AsyncIterator[None]:
    configs = {
        name: AgentConfig(
            coordinator=address,
            credentials=folder / name,
            state=folder / "state" / name,
            tasks={"toy": "toy.py:Toy"},
            data={"seed": seed},
            device="cpu",
            threads=1,
            folder=folder,
            cluster=cluster,
        )
        for seed, (name, cluster) in enumerate(CLUSTERS.items())
    }
    running = [
        Agent(config, ClusterTrainer(config, name, config.state / "jobs") if config.cluster else None)
        for name, config in configs.items()
    ]
    tasks = [asyncio.create_task(agent.run()) for agent in running]
    try:
        yield
    finally:
        for agent in running:
            agent.stop()
        await asyncio.gather(*tasks)


def run_job(
    address: str, folder: Path, job: JobConfig, model: Model
) -> tuple[str, list[dict[str, object]], Model, dict[str, StepFigures]]:
    """Submits a job and waits for its end: (status, history, model, newest step told by each silo)."""
    save_model(folder / "initial.safetensors", model)
    told: dict[str, StepFigures] = {}
    with OperatorClient(address, folder / "operator") as operator:
        submitted = operator.submit(job, folder / "initial.safetensors")
        for update in operator.watch(submitted.id):
            told.update(
                {client.client: client.figures for client in update.detail.clients if client.figures.step}
            )
        detail = operator.job(submitted.id)
        operator.get_artifact(detail.job.model.digest, detail.job.model.size, folder / "final.safetensors")
    history = [json.loads(record) for record in detail.history]
    return detail.job.status, history, open_model(folder / "final.safetensors"), told


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_clusters_and_a_plain_silo_train_one_model(federation: tuple[str, Path]) -> None:
    address, folder = federation
    table = {
        "task": "toy",
        "rounds": 3,
        "cohort": {"size": 3, "deadline": 300},
        "algorithm": {"learning_rate": 0.3, "epochs": 3, "batch_size": 8},
        "evaluation": {"deadline": 300},
    }
    plain = JobConfig.model_validate(table)
    masked = {
        "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 10.0},
        "evaluation": {"every": 0},
    }
    secure = JobConfig.model_validate({**table, **masked})
    model = initial_model(plain, load_task("toy.py", folder))
    async with agents(address, folder):
        status, history, seen, told = await asyncio.to_thread(run_job, address, folder, plain, model)
        assert status == "finished"
        assert [record["contributors"] for record in history] == [sorted(CLUSTERS)] * 3
        accuracy = history[-1]["evaluation"]["accuracy"]  # type: ignore[index]
        assert accuracy[1] == 3 * 16
        assert accuracy[0] / accuracy[1] > 0.7
        # The clusters tell of their steps, the plain silo of its progress alone.
        assert sorted(told) == ["alder", "birch"]
        assert all(step.steps == 12 and step.memory_bytes > 1 << 20 for step in told.values())
        status, _, hidden, told = await asyncio.to_thread(run_job, address, folder, secure, model)
        assert status == "finished"
        # Under privacy a silo's steps are its own.
        assert told == {}
    # Equal up to the fixed-point steps of masking.
    assert (seen.vector - hidden.vector).abs().max() < 2e-3
