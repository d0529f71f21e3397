"""A silo's agent for chaos and load: its update is a vector that depends on the round and its name only."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import torch

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, write_update
from roundtable.client.training.metrics import Metrics
from roundtable.core.models import open_model
from roundtable.core.seeds import torch_generator

EXAMPLES = 10


def delta_of(round: int, name: str, columns: int) -> torch.Tensor:
    """What this silo gives in this round."""
    return torch.randn(columns, generator=torch_generator(1, round, name, "chaos"))


class GivenTrainer:
    """Takes a while, then writes the given vector."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds

    async def start(self) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        await asyncio.sleep(self._seconds)
        columns = open_model(work.model).layout.size
        delta = delta_of(work.step.round, self._name, columns)
        digest, size = write_update(work.output, delta, work.job.transfer.encoding)
        return TrainedUpdate(digest, size, EXAMPLES, {"loss": (1.0, EXAMPLES)})

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return {"accuracy": (1.0, 1)}

    def release(self, job: str) -> None: ...

    async def close(self) -> None: ...


def main() -> None:
    values = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    config = AgentConfig(
        coordinator=values["coordinator"],
        standbys=tuple(values["standbys"]),
        credentials=Path(values["credentials"]),
        state=Path(values["state"]),
        tasks={"toy": "toy.py:Toy"},
        device="cpu",
        threads=1,
        folder=Path(values["folder"]),
    )
    torch.set_num_threads(1)
    asyncio.run(Agent(config, GivenTrainer(values["name"], values["seconds"])).run())


if __name__ == "__main__":
    main()
