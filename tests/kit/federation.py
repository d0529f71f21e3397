"""A whole federation within a test: the real coordinator, and real agents with their training processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import Trainer
from roundtable.cluster.agent.cluster_trainer import ClusterTrainer
from roundtable.core import JobConfig, Model, open_model, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient
from roundtable.server import Coordinator, ServerConfig
from roundtable.trusted import TrustedData

NAMES = ("alder", "birch", "cedar")
Federation = tuple[str, Path]


@asynccontextmanager
async def federation_of(
    folder: Path, task: str, trusted: TrustedData | None = None, **settings: Any
) -> AsyncIterator[Federation]:
    """A coordinator's address, and a folder with credentials and the task as toy.py.

    `settings` are further keys of coordinator.toml; `trusted` is what is read of its [root_data].
    """
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", hosts=("127.0.0.1",))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    for name in NAMES:
        issue(folder / "ca", name, "agent", folder / name)
    (folder / "toy.py").write_text(task)
    config = ServerConfig(
        listen="127.0.0.1:0",
        state=str(folder / "server"),
        database=f"sqlite:///{folder / 'coordinator.db'}",
        artifacts=str(folder / "artifacts"),
        credentials=str(folder / "coordinator"),
        **settings,
    )
    coordinator = Coordinator(config, trusted=trusted)
    await coordinator.start()
    try:
        yield f"127.0.0.1:{coordinator.port}", folder
    finally:
        await coordinator.stop()


def silo(federation: Federation, name: str) -> AgentConfig:
    """The silo's agent.toml; its number is in `data.seed`."""
    address, folder = federation
    return AgentConfig(
        coordinator=address,
        credentials=folder / name,
        state=folder / "state" / name,
        tasks={"toy": "toy.py:Toy"},
        data={"seed": NAMES.index(name)},
        device="cpu",
        threads=1,
        folder=folder,
    )


@asynccontextmanager
async def agents(*configs: AgentConfig) -> AsyncIterator[None]:
    """These agents while the block lasts, each with the trainer that its table asks for."""
    running = [Agent(config, _trainer_of(config)) for config in configs]
    tasks = [asyncio.create_task(agent.run()) for agent in running]
    try:
        yield
    finally:
        for agent in running:
            agent.stop()
        await asyncio.gather(*tasks)


def _trainer_of(config: AgentConfig) -> Trainer | None:
    if config.cluster is None:
        return None
    return ClusterTrainer(config, config.credentials.name, config.state / "jobs")


def run_job(
    federation: Federation, job: JobConfig, model: Model
) -> tuple[str, list[dict[str, object]], Model]:
    """Submits a job and waits until it ends or is paused: (status, history, the model that it gives)."""
    address, folder = federation
    save_model(folder / "initial.safetensors", model)
    with OperatorClient(address, folder / "operator") as operator:
        submitted = operator.submit(job, folder / "initial.safetensors")
        for update in operator.watch(submitted.id):
            if update.detail.job.status == "paused":
                break
        detail = operator.job(submitted.id)
        given = detail.job.best.model if detail.job.HasField("best") else detail.job.model
        operator.get_artifact(given.digest, given.size, folder / "final.safetensors")
    history = [json.loads(record) for record in detail.history]
    return detail.job.status, history, open_model(folder / "final.safetensors")
