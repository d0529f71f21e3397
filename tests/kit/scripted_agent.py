"""An agent that does what a test tells it, over a real connection: what the coordinator sees of a silo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import torch
from blake3 import blake3
from definite import definite

from roundtable.core.identity.credentials import load_credentials
from roundtable.proto import CHUNK_BYTES, PROTOCOL_VERSION, agent_pb2, agent_pb2_grpc, common_pb2
from roundtable.proto.channel import CLIENT_OPTIONS

PATIENCE = 20.0


def secure_channel(port: int, credentials: Path) -> Any:
    """A channel to a coordinator on this machine."""
    own = load_credentials(credentials)
    secure = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    return grpc.aio.secure_channel(f"localhost:{port}", secure, options=CLIENT_OPTIONS)


class ScriptedAgent:
    """One agent. `connect` says hello; `next` takes what the coordinator pushes; the rest is explicit."""

    def __init__(
        self, port: int, credentials: Path, tasks: tuple[str, ...] = ("t",), **metadata: str
    ) -> None:
        self.channel = secure_channel(port, credentials)
        self.stub: Any = agent_pb2_grpc.AgentsStub(self.channel)
        self.tasks = tasks
        self.metadata = metadata
        self.capacity: Any = None
        self.welcome: Any = None
        self.call: Any = None

    async def __aenter__(self) -> ScriptedAgent:
        await self.connect()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    async def connect(self, **changes: Any) -> Any:
        """Opens the control stream and returns the coordinator's first message."""
        hello = {"version": "test", "protocol": PROTOCOL_VERSION, "tasks": self.tasks, "clock": time.time()}
        message = agent_pb2.Hello(
            **{**hello, "metadata": self.metadata, "capacity": self.capacity, **changes}
        )

        async def greet() -> Any:
            self.call = self.stub.Connect()
            await self.call.write(agent_pb2.FromAgent(hello=message))
            return await self.next()

        first = await definite(greet)
        self.welcome = first.welcome if first.WhichOneof("message") == "welcome" else None
        return first

    async def close(self) -> None:
        """Cuts the connection."""
        if self.call is not None:
            self.call.cancel()
        await self.channel.close()

    async def next(self) -> Any:
        """The next message of the coordinator; None at the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            message = await self.call.read()
        return None if message is grpc.aio.EOF else message

    async def expect(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        message = await self.next()
        arrived = message.WhichOneof("message") if message else "the end of the stream"
        assert arrived == kind, f"expected {kind}, got {arrived}: {message}"
        return getattr(message, kind)

    async def say(self, **message: Any) -> None:
        """Sends one message, for example `heartbeat=Heartbeat(...)`."""
        await self.call.write(agent_pb2.FromAgent(**message))

    async def download(self, digest: str, offset: int = 0) -> bytes:
        """The artifact's bytes from an offset."""
        request = common_pb2.DownloadRequest(digest=digest, offset=offset)
        data = bytearray()
        async for chunk in self.stub.Download(request):
            assert chunk.offset == offset + len(data)
            data += chunk.data
        return bytes(data)

    async def upload(
        self, header: agent_pb2.UploadHeader, data: bytes, chunk_bytes: int = CHUNK_BYTES
    ) -> Any:
        """Sends the bytes from the header's offset onwards; returns the receipt."""

        async def parts() -> AsyncIterator[agent_pb2.UploadPart]:
            yield agent_pb2.UploadPart(header=header)
            for place in range(header.offset, len(data), chunk_bytes):
                piece = common_pb2.Chunk(offset=place, data=data[place : place + chunk_bytes])
                yield agent_pb2.UploadPart(chunk=piece)

        return await definite(lambda: self.stub.Upload(parts(), timeout=PATIENCE))

    async def answer(
        self, instruction: agent_pb2.Instruction, vector: torch.Tensor, examples: int = 10, **metrics: float
    ) -> Any:
        """Uploads a float32 vector as the answer to a training instruction."""
        data = vector.numpy().tobytes()
        return await self.upload(header_for(instruction, data, examples, **metrics), data)

    async def evaluate(self, instruction: agent_pb2.Instruction, **sums: tuple[float, int]) -> None:
        """Answers an evaluation."""
        metrics = [common_pb2.Metric(name=n, sum=s, count=c) for n, (s, c) in sums.items()]
        await self.say(evaluated=agent_pb2.Evaluated(step=instruction.step, metrics=metrics))

    async def take_part(self, change: torch.Tensor, examples: int = 10) -> None:
        """Answers everything until the stream ends: training with `change`, evaluation with loss 1."""
        while (message := await self.call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") != "instruction":
                continue
            if message.instruction.WhichOneof("work") == "train":
                await self.answer(message.instruction, change, examples, loss=1.0)
            else:
                await self.evaluate(message.instruction, loss=(float(examples), examples))


def header_for(
    instruction: agent_pb2.Instruction, data: bytes, examples: int = 10, offset: int = 0, **means: float
) -> agent_pb2.UploadHeader:
    """The header that a well-behaved agent would send."""
    metrics = [common_pb2.Metric(name=n, sum=v * examples, count=examples) for n, v in means.items()]
    return agent_pb2.UploadHeader(
        step=instruction.step,
        content=common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data)),
        layout=instruction.train.layout,
        encoding="float32",
        examples=examples,
        metrics=metrics,
        offset=offset,
    )
