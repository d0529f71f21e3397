"""A coordinator and agents within a test, over real TLS, whose training is a vector that the test gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from service import Operator

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, write_update
from roundtable.client.training.metrics import Metrics
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.server import Coordinator, ServerConfig

QUIET = "[evaluation]\nevery = 0\n"
SECURE = QUIET + "[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 2.0\n"


@dataclass
class GivenTrainer:
    """`delta(round)` is what training gives; `gate` holds it back until it is set."""

    delta: Callable[[int], torch.Tensor]
    examples: int = 10
    loss: float = 0.5
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    steps: list[Any] = field(default_factory=list)

    async def start(self) -> None: ...

    async def check(self, work: StepWork) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        self.steps.append(work.step)
        self.began.set()
        await self.gate.wait()
        digest, size = write_update(work.output, self.delta(work.step.round), work.job.transfer.up)
        sums = {"loss": (self.loss * self.examples, self.examples), "secret": (1.0, self.examples)}
        return TrainedUpdate(digest, size, self.examples, sums)

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return {"accuracy": (1.0, 2)}

    def release(self, job: str, *, met: bool) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Federation:
    """Folders and settings; processes come and go within a test."""

    folder: Path
    names: tuple[str, ...]
    port: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, *names: str) -> Federation:
        create_ca(folder / "ca")
        issue(folder / "ca", "hub", "coordinator", folder / "hub", hosts=("127.0.0.1", "localhost"))
        issue(folder / "ca", "ada", "operator", folder / "ada")
        for name in names:
            issue(folder / "ca", name, "agent", folder / name)
        return cls(folder, names)

    def server_config(self) -> ServerConfig:
        usual = {
            "listen": f"127.0.0.1:{self.port}",
            "state": str(self.folder / "server"),
            "database": f"sqlite:///{self.folder / 'coordinator.db'}",
            "artifacts": str(self.folder / "artifacts"),
            "credentials": str(self.folder / "hub"),
            "heartbeat": 1.0,
        }
        return ServerConfig(**{**usual, **self.settings})

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[Coordinator]:
        coordinator = Coordinator(self.server_config())
        await coordinator.start()
        self.port = coordinator.port
        try:
            yield coordinator
        finally:
            await coordinator.stop()

    def operator(self) -> Operator:
        return Operator(self.port, self.folder / "ada")

    def config(self, name: str, **changes: Any) -> AgentConfig:
        return replace(
            AgentConfig(
                coordinator=f"127.0.0.1:{self.port}",
                credentials=self.folder / name,
                state=self.folder / "state" / name,
                tasks={"t": "t.py:T"},
                device="cpu",
                threads=1,
                folder=self.folder,
            ),
            **changes,
        )

    @asynccontextmanager
    async def agent(
        self, name: str, trainer: GivenTrainer | None, **changes: Any
    ) -> AsyncIterator[asyncio.Task[None]]:
        """A running agent, with a training process where no trainer is given; cancelling its task is a kill:
        nobody is told."""
        agent = Agent(self.config(name, **changes), trainer)
        running = asyncio.create_task(agent.run())
        try:
            yield running
        finally:
            agent.stop()
            await asyncio.gather(running, return_exceptions=True)

    async def kill(self, running: asyncio.Task[None]) -> None:
        """Ends an agent without a word; its files stay as they are."""
        running.cancel()
        await asyncio.wait([running])

    @asynccontextmanager
    async def agents(self, trainers: Mapping[str, GivenTrainer], **changes: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for name, trainer in trainers.items():
                await stack.enter_async_context(self.agent(name, trainer, **changes))
            yield

    def trainers(self, columns: int, **settings: Any) -> dict[str, GivenTrainer]:
        """One for each silo, which gives a vector of its own of length 1, and more examples to the later."""
        made = {}
        for place, name in enumerate(self.names):
            made[name] = GivenTrainer(
                lambda round, place=place: unit(place, round, columns), examples=10 + 20 * place
            )
            made[name].gate.set()
        return made


def unit(place: int, round: int, columns: int) -> torch.Tensor:
    """A silo's update."""
    vector = torch.randn(columns, generator=torch.Generator().manual_seed(100 * place + round))
    return vector / vector.norm()
