"""A silo's agent for tests, whose training happens within its own process: one to start, one to kill."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from secure_process import fail_at

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate
from roundtable.client.training.metrics import Metrics
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.client.worker.worker_trainer import order_of_work


class InlineTrainer:
    """Does orders in a thread, with the same code as the training process."""

    def __init__(self, config: AgentConfig, name: str) -> None:
        jobs = str(config.state / "jobs")
        # A step that was withdrawn goes on in its thread; the next one waits for it.
        self._turn = Lock()
        self._executor = Executor(Settings(name, str(config.folder), jobs, "cpu", 1, config.data))

    async def start(self) -> None: ...

    async def check(self, work: StepWork) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        return await asyncio.to_thread(self._in_turn, self._train, work)

    def _train(self, order: Order) -> TrainedUpdate:
        return self._executor.train(order, _silent)

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return await asyncio.to_thread(self._in_turn, self._executor.evaluate, work)

    def _in_turn(self, do: Callable[..., Any], work: StepWork) -> Any:
        with self._turn:
            return do(order_of_work(work))

    def release(self, job: str, *, met: bool) -> None: ...

    async def close(self) -> None: ...


def _silent(done: int, total: int, loss: float) -> None:
    """Progress is told from the event loop's thread only."""


def main() -> None:
    values = json.loads(sys.argv[1])
    if fault := values.get("fault_at"):
        fail_at(fault)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    config = AgentConfig(
        coordinator=values["coordinator"],
        credentials=Path(values["credentials"]),
        state=Path(values["state"]),
        tasks=values.get("tasks", {"toy": "toy.py:Toy"}),
        data=values.get("data", {}),
        device="cpu",
        threads=1,
        folder=Path(values["folder"]),
        standbys=tuple(values.get("standbys", ())),
        relay=values.get("relay", ""),
        policy=PolicyTable(regional_models=values.get("regional_models", [])),
    )
    asyncio.run(Agent(config, InlineTrainer(config, values["name"])).run())


if __name__ == "__main__":
    main()
