"""A scripted coordinator over real gRPC and TLS, and a silo to set against it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from blake3 import blake3

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, Trainer
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.client.training.metrics import Metrics
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_trainer import order_of_work
from roundtable.core import JobConfig, Model, load_task
from roundtable.core.identity.credentials import create_ca, issue, load_credentials
from roundtable.core.initial_model import initial_model
from roundtable.core.models import model_blocks
from roundtable.core.task import Site
from roundtable.proto import agent_pb2, agent_pb2_grpc, common_pb2
from roundtable.proto.channel import SERVER_OPTIONS

TASK = """
import os, signal, time, torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    width = {width}
    def model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(0)
        n = site.options.get("examples", 32)
        x, y = torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)
        return (x, y), (x, y)
    def loss(self, model, batch):
        trick = open("trick").read() if os.path.exists("trick") else ""
        if trick == "raise":
            raise ValueError("the patient is Jane Doe")
        if trick == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trick == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if trick == "memory" or (trick.startswith("more than") and len(batch[1]) > int(trick.split()[-1])):
            raise MemoryError
        if os.path.exists("summed"):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        if trick == "slow":
            time.sleep(0.02)
        if trick == "hang":
            print("hanging", flush=True)
            time.sleep(1000)
        if trick == "nan":
            return model(batch[0]).sum() * float("nan")
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {{"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}}
"""


@dataclass
class Upload:
    """What has arrived of one update."""

    header: agent_pb2.UploadHeader
    data: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)


class ScriptedCoordinator(agent_pb2_grpc.AgentsServicer):
    """Does what a test tells it to; keeps what it was told."""

    def __init__(self, credentials: Path) -> None:
        held = load_credentials(credentials)
        self._secrets = grpc.ssl_server_credentials(
            [(held.key, held.certificate)], held.ca, require_client_auth=True
        )
        self.port = 0
        self.refuse = ""
        self.identity = "database-1"
        self.beat = 0.2
        self.clock_offset = 0.0
        self.artifacts: dict[str, bytes] = {}
        self.downloads: list[int] = []
        self.cut_download: int | None = None
        self.cut_upload: int | None = None
        self.cut_again = False
        self.damaged = 0
        self.when_damaged: Callable[[], None] = lambda: None
        self.uploads: dict[tuple[Any, ...], Upload] = {}
        self.receipts: dict[tuple[Any, ...], agent_pb2.UploadReceipt] = {}
        self.statuses: list[agent_pb2.UploadHeader] = []
        self.on_message: Callable[[agent_pb2.FromAgent], None] = lambda message: None
        self.on_offer: Callable[[agent_pb2.UploadHeader], None] = lambda header: None
        self.hellos: list[agent_pb2.Hello] = []
        self.heard: list[agent_pb2.FromAgent] = []
        self._news = asyncio.Condition()
        self._outbox: asyncio.Queue[agent_pb2.ToAgent] | None = None
        self._read = 0

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        agent_pb2_grpc.add_AgentsServicer_to_server(self, self._server)
        self.port = self._server.add_secure_port(f"127.0.0.1:{self.port}", self._secrets)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)
        self._outbox = None

    async def Connect(self, requests: Any, context: Any) -> None:
        first = await anext(aiter(requests))
        if self.refuse:
            await context.write(agent_pb2.ToAgent(refused=agent_pb2.Refused(reason=self.refuse)))
            return
        welcome = agent_pb2.Welcome(
            version="1",
            coordinator=self.identity,
            heartbeat_seconds=self.beat,
            clock=time.time() + self.clock_offset,
        )
        await context.write(agent_pb2.ToAgent(welcome=welcome))
        outbox: asyncio.Queue[agent_pb2.ToAgent] = asyncio.Queue()
        self._outbox = outbox
        await self._note(hello=first.hello)
        sender = asyncio.create_task(self._send(outbox, context))
        try:
            async for message in requests:
                self.on_message(message)
                if message.HasField("heartbeat"):
                    self.say(heartbeat=agent_pb2.Heartbeat())
                await self._note(message)
                if message.HasField("goodbye"):
                    return
        finally:
            sender.cancel()

    async def Download(self, request: Any, context: Any) -> None:
        data = self.artifacts[request.digest]
        self.downloads.append(request.offset)
        cut, self.cut_download = self.cut_download, None
        for offset in range(request.offset, len(data), 64):
            if cut is not None and offset >= cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
            await context.write(common_pb2.Chunk(offset=offset, data=data[offset : offset + 64]))

    async def UploadStatus(self, request: Any, context: Any) -> agent_pb2.UploadState:
        key = _key(request.step)
        self.on_offer(request)
        self.statuses.append(request)
        await self._note()
        if key in self.receipts:
            return agent_pb2.UploadState(receipt=self.receipts[key])
        arrived = self.uploads.get(key)
        return agent_pb2.UploadState(offset=len(arrived.data) if arrived else 0, wanted=True)

    async def Upload(self, requests: Any, context: Any) -> agent_pb2.UploadReceipt:
        requests = aiter(requests)
        header = (await anext(requests)).header
        self.on_offer(header)
        key = _key(header.step)
        upload = self.uploads.setdefault(key, Upload(header))
        upload.offsets.append(header.offset)
        cut = self.cut_upload
        if not self.cut_again:
            self.cut_upload = None
        del upload.data[header.offset :]
        async for part in requests:
            assert part.chunk.offset == len(upload.data)
            upload.data += part.chunk.data
            if cut is not None:
                del upload.data[cut:]
                await self._note()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
        if self.damaged:
            self.damaged -= 1
            upload.data.clear()
            self.when_damaged()
            await context.abort(grpc.StatusCode.DATA_LOSS, "damaged by the test")
        assert blake3(upload.data).hexdigest() == header.content.digest
        accepted = agent_pb2.UploadReceipt(status=agent_pb2.UploadReceipt.ACCEPTED)
        receipt = self.receipts.setdefault(key, accepted)
        await self._note()
        return receipt

    def say(self, **message: Any) -> None:
        """Sends a message to the agent, if it is there."""
        if self._outbox is not None:
            self._outbox.put_nowait(agent_pb2.ToAgent(**message))

    async def until(self, condition: Callable[[], Any]) -> Any:
        """The condition's value as soon as it holds; it is looked at whenever something arrives."""
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(condition)
            return condition()

    async def hear(self, kind: str) -> Any:
        """The next message of this kind that no call has returned yet."""

        def find() -> Any:
            for index in range(self._read, len(self.heard)):
                if self.heard[index].WhichOneof("message") == kind:
                    return index + 1
            return None

        self._read = await self.until(find)
        return getattr(self.heard[self._read - 1], kind)

    async def _note(
        self, message: agent_pb2.FromAgent | None = None, hello: agent_pb2.Hello | None = None
    ) -> None:
        async with self._news:
            if message is not None:
                self.heard.append(message)
            if hello is not None:
                self.hellos.append(hello)
            self._news.notify_all()

    async def _send(self, outbox: asyncio.Queue[agent_pb2.ToAgent], context: Any) -> None:
        while True:
            await context.write(await outbox.get())


def _key(step: common_pb2.Step) -> tuple[Any, ...]:
    return (step.job, step.round, step.attempt, step.phase)


class InlineTrainer:
    """The same work without a process of its own, for tests of everything else."""

    def __init__(self, config: AgentConfig) -> None:
        settings = Settings("hospital", str(config.folder), str(config.state / "jobs"), "cpu", None, {})
        self._executor = Executor(settings)
        self.done: list[StepKey] = []
        self.gate: asyncio.Event | None = None

    async def start(self) -> None: ...

    async def check(self, work: StepWork) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        if self.gate is not None:
            await self.gate.wait()
        self.done.append(work.step)
        loop = asyncio.get_running_loop()

        def told(done: int, total: int, loss: float) -> None:
            loop.call_soon_threadsafe(progress, done, total, loss)

        return await asyncio.to_thread(self._executor.train, order_of_work(work), told)

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        self.done.append(work.step)
        return await asyncio.to_thread(self._executor.evaluate, order_of_work(work))

    def release(self, job: str, *, met: bool) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Silo:
    """A silo's files, and a job that it can do."""

    config: AgentConfig
    job: JobConfig
    model: Model
    coordinator: ScriptedCoordinator

    def play(self, trick: str) -> None:
        """What the task does from now on."""
        (self.config.folder / "trick").write_text(trick)

    def inline(self) -> InlineTrainer:
        """A trainer within the test's process."""
        return InlineTrainer(self.config)

    @property
    def spooled(self) -> list[str]:
        """Names of the files in the spool that are still to be delivered."""
        files = (self.config.state / "spool").iterdir()
        return sorted(path.name for path in files if path.suffix != ".sent")

    def instruction(
        self, round: int = 1, attempt: int = 1, phase: str = "train", deadline: float = 60.0, steps: int = 0
    ) -> agent_pb2.Instruction:
        """An order to train or to evaluate this silo's initial model, in which the round before counts."""
        data = b"".join(bytes(block) for block in model_blocks(self.model))
        digest = blake3(data).hexdigest()
        self.coordinator.artifacts[digest] = data
        work = {
            "model": common_pb2.Artifact(digest=digest, size=len(data)),
            "layout": self.model.layout.fingerprint,
        }
        step = common_pb2.Step(job="job-1", round=round, attempt=attempt, phase=phase)
        asked: dict[str, Any] = (
            {"evaluate": agent_pb2.Evaluate(**work)}
            if phase == "evaluate"
            else {"train": agent_pb2.Train(**work, steps=steps)}
        )
        if round > 1:
            asked["counted"] = common_pb2.Step(job="job-1", round=round - 1, attempt=1, phase="train")
        return agent_pb2.Instruction(
            step=step, deadline_seconds=deadline, job_config=self.job.to_json(), **asked
        )

    def delta(self, round: int = 1) -> torch.Tensor:
        """The update that arrived for a round."""
        return torch.frombuffer(
            self.coordinator.uploads[("job-1", round, 1, "train")].data, dtype=torch.float32
        )

    def expected(self, round: int = 1) -> torch.Tensor:
        """The update of a round by training within this process, batch by batch."""
        task = load_task("toy.py", self.config.folder)
        data, _ = task.data(Site("hospital"))
        start, layout = self.model.vector.clone(), self.model.layout
        return train(task, task.model(), data, LocalWork(self.job, layout, start, round, "hospital")).delta

    @asynccontextmanager
    async def agent(self, trainer: Trainer | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """A running agent, connected to the coordinator; stopped at the end."""
        greeted = len(self.coordinator.hellos)
        agent = Agent(self.config, trainer)
        running = asyncio.create_task(agent.run())
        connected = asyncio.create_task(
            self.coordinator.until(lambda: len(self.coordinator.hellos) > greeted)
        )
        await asyncio.wait([running, connected], return_when=asyncio.FIRST_COMPLETED)
        connected.cancel()
        try:
            if running.done():
                await running
            yield running
        finally:
            agent.stop()
            await asyncio.wait([running])


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA and credentials for a coordinator and an agent."""
    folder = tmp_path_factory.mktemp("ca")
    create_ca(folder / "ca")
    issue(
        folder / "ca", "coordinator", "coordinator", folder / "coordinator", hosts=("127.0.0.1", "localhost")
    )
    issue(folder / "ca", "hospital", "agent", folder / "hospital")
    return folder


@pytest.fixture
async def coordinator(authority: Path) -> AsyncIterator[ScriptedCoordinator]:
    """A scripted coordinator that listens."""
    scripted = ScriptedCoordinator(authority / "coordinator")
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
def listening() -> Callable[..., Any]:
    """Makes a scripted coordinator that listens within a block, with credentials and at a port of choice."""

    @asynccontextmanager
    async def start(credentials: Path, port: int = 0) -> AsyncIterator[ScriptedCoordinator]:
        scripted = ScriptedCoordinator(credentials)
        scripted.port = port
        await scripted.start()
        try:
            yield scripted
        finally:
            await scripted.stop()

    return start


@pytest.fixture(scope="session")
def a_silo(authority: Path) -> Callable[..., Any]:
    """Makes a silo with one task in a folder, and a scripted coordinator for it that listens in a block."""

    @asynccontextmanager
    async def start(folder: Path) -> AsyncIterator[Silo]:
        scripted = ScriptedCoordinator(authority / "coordinator")
        await scripted.start()
        try:
            yield make_silo(authority, scripted, folder)
        finally:
            await scripted.stop()

    return start


@pytest.fixture
def silo(authority: Path, coordinator: ScriptedCoordinator, tmp_path: Path) -> Silo:
    """A silo with one task, set up to reach the coordinator."""
    return make_silo(authority, coordinator, tmp_path)


def make_silo(authority: Path, coordinator: ScriptedCoordinator, folder: Path, width: int = 8) -> Silo:
    (folder / "toy.py").write_text(TASK.format(width=width))
    config = AgentConfig(
        coordinator=f"127.0.0.1:{coordinator.port}",
        credentials=authority / "hospital",
        state=folder / "state",
        tasks={"toy": "toy.py:Toy"},
        device="cpu",
        threads=1,
        folder=folder,
    )
    job = JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": {"batch_size": 8}})
    return Silo(config, job, initial_model(job, load_task("toy.py", folder)), coordinator)


class Log(logging.Handler):
    """Lets a test wait for a line of the agent's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._loop.call_soon_threadsafe(self._news.set)

    async def until(self, part: str) -> str:
        async with asyncio.timeout(60):
            while not (found := [line for line in self.lines if part in line]):
                await self._news.wait()
                self._news.clear()
        return found[0]


@pytest.fixture
async def log() -> AsyncIterator[Log]:
    """The agent's log."""
    handler, logger = Log(), logging.getLogger("roundtable.agent")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
