"""Light agents for load tests: many to a process, each with its own certificate, connection and heartbeats.

    python benchmarks/light_agents.py FOLDER PORT FIRST COUNT TRAIN DIAL HEARTBEAT [RELAY]

is such a process, which benchmarks/load.py starts.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric import ed25519

from roundtable.core.identity.credentials import (
    SiloIdentity,
    load_credentials,
    load_silo_identity,
)
from roundtable.core.identity.signing import passage_values, sign
from roundtable.proto import PROTOCOL_VERSION, agent_pb2, agent_pb2_grpc, common_pb2
from roundtable.proto.channel import CLIENT_OPTIONS
from roundtable.proto.receipts import update_values

VALUES = 1000
JOBS_A_SILO = 50
HEARTBEAT = 5.0
BARE = """
import asyncio, sys, tomllib
from pathlib import Path
import grpc
from roundtable.core.allocator import tune_for_transfers
from roundtable.core.identity.credentials import load_credentials
from roundtable.proto import agent_pb2_grpc
from roundtable.proto.channel import SERVER_OPTIONS

class Agents(agent_pb2_grpc.AgentsServicer):
    async def Connect(self, requests, context):
        async for _ in requests:
            pass

async def main():
    tune_for_transfers()
    file = Path(sys.argv[1])
    values = tomllib.loads(file.read_text())
    held = load_credentials(file.parent / values["credentials"])
    server = grpc.aio.server(options=SERVER_OPTIONS)
    agent_pb2_grpc.add_AgentsServicer_to_server(Agents(), server)
    secrets = grpc.ssl_server_credentials([(held.key, held.certificate)], held.ca, True)
    server.add_secure_port(values["listen"], secrets)
    await server.start()
    print("listening", flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
"""A server that does nothing but hold their connections."""


class LightAgent:
    """One agent as the coordinator sees it; it answers every instruction with a vector of ones.

    It answers at once, or as silos that train do: after `train` seconds at most, and half of that at least.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        arrivals: list[tuple[int, float]],
        train: float,
        heartbeat: float = HEARTBEAT,
        relay: str = "",
    ) -> None:
        held = load_credentials(folder)
        self._name, self._relay = held.name, relay
        self._identity = load_silo_identity(folder)
        self._installation = ed25519.Ed25519PrivateKey.generate()
        secrets = grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.secure_channel(f"localhost:{port}", secrets, options=options)
        self._stub: Any = agent_pb2_grpc.AgentsStub(self._channel)
        self._arrivals = arrivals
        self._train = train
        self._heartbeat = heartbeat

    async def run(self) -> None:
        """Takes part until cancelled; comes back after a loss."""
        while True:
            try:
                await self._serve()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(1.0)

    async def _serve(self) -> None:
        call = self._stub.Connect()
        hello = agent_pb2.Hello(version="load", protocol=PROTOCOL_VERSION, tasks=["t"], clock=time.time())
        hello.capacity.jobs = JOBS_A_SILO
        if self._relay:
            key = hello.installation = self._installation.public_key().public_bytes_raw()
            hello.identity = self._identity.certificate
            hello.passage.relay = self._relay
            values = passage_values(self._name, self._relay, key)
            hello.passage.signature = sign(self._identity, "passage", values)
        await call.write(agent_pb2.FromAgent(hello=hello))
        beating = asyncio.create_task(self._beat(call))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.WhichOneof("message") == "challenge":
                    values = {"nonce": message.challenge.hex(), "name": self._name}
                    proof = sign(SiloIdentity(b"", self._installation), "installation", values)
                    await call.write(agent_pb2.FromAgent(proof=proof))
                if message.WhichOneof("message") == "instruction":
                    self._arrivals.append((message.instruction.step.round, time.time()))
                    await self._answer(message.instruction)
        finally:
            beating.cancel()

    async def _beat(self, call: Any) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            await call.write(agent_pb2.FromAgent(heartbeat=agent_pb2.Heartbeat(state="available")))

    async def _answer(self, instruction: agent_pb2.Instruction) -> None:
        if self._train:
            await asyncio.sleep(self._train * random.uniform(0.5, 1))
        data = torch.ones(VALUES).numpy().tobytes()
        header = agent_pb2.UploadHeader(
            step=instruction.step,
            content=common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data)),
            layout=instruction.train.layout,
            encoding="float32",
            examples=10,
        )
        if self._relay:
            header.model, header.time = instruction.train.model.digest, time.time()
            header.signature = sign(self._identity, "update", update_values(self._name, header))

        async def parts() -> AsyncIterator[agent_pb2.UploadPart]:
            yield agent_pb2.UploadPart(header=header)
            yield agent_pb2.UploadPart(chunk=common_pb2.Chunk(offset=0, data=data))

        await self._stub.Upload(parts())


async def be_agents(
    folder: Path,
    port: int,
    first: int,
    count: int,
    train: float,
    dial: float,
    heartbeat: float,
    relay: str = "",
) -> None:
    """A process full of agents, until its standard input ends; then it prints when instructions came.

    Agent n dials after n / `dial` seconds, or at once where that is 0.
    """
    arrivals: list[tuple[int, float]] = []

    async def begin(number: int) -> None:
        await asyncio.sleep(number / dial if dial else 0.0)
        await LightAgent(folder / f"agent{number}", port, arrivals, train, heartbeat, relay).run()

    tasks = [asyncio.create_task(begin(number)) for number in range(first, first + count)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    print(json.dumps(arrivals))


def main() -> None:
    """One process."""
    folder, port, first, count, train, dial, heartbeat, *relay = sys.argv[1:]
    counts, seconds = map(int, (port, first, count)), map(float, (train, dial, heartbeat))
    asyncio.run(be_agents(Path(folder), *counts, *seconds, *relay))


if __name__ == "__main__":
    main()
