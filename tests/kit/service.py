"""A coordinator within a test, and an operator of it over a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from definite import definite
from scripted_agent import secure_channel

from roundtable.core import Layout, Model, parse_job
from roundtable.core.models import model_blocks
from roundtable.proto import operator_pb2, operator_pb2_grpc
from roundtable.proto.common_pb2 import Artifact, Chunk, DownloadRequest
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.dashboard import Dashboard
from roundtable.server.jobs.trusted_training import TrustedTraining

AGENTS = ("alder", "birch", "cedar")


@asynccontextmanager
async def running(
    config: ServerConfig, trusted: TrustedTraining | None = None, dashboard: Dashboard | None = None
) -> AsyncIterator[Coordinator]:
    """A coordinator while the block lasts."""
    started = Coordinator(config, trusted=trusted, dashboard=dashboard)
    await started.start()
    try:
        yield started
    finally:
        await started.stop()


class Operator:
    """What tests ask of a coordinator as an operator, over a real connection."""

    def __init__(self, port: int, credentials: Path) -> None:
        self.channel = secure_channel(port, credentials)
        self.stub: Any = operator_pb2_grpc.OperatorsStub(self.channel)

    async def __aenter__(self) -> Operator:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.channel.close()

    async def put(self, data: bytes, offset: int = 0, digest: str = "", size: int | None = None) -> Any:
        """Stores bytes."""
        content = Artifact(
            digest=digest or blake3(data).hexdigest(), size=len(data) if size is None else size
        )
        yields = [operator_pb2.PutPart(header=operator_pb2.PutHeader(content=content))]
        if len(data) > offset:
            yields.append(operator_pb2.PutPart(chunk=Chunk(offset=offset, data=data[offset:])))
        return await definite(lambda: self.stub.PutArtifact(iter(yields)))

    async def submit(
        self, text: str = "", rounds: int = 2, vector: torch.Tensor | None = None, request: str = "r1"
    ) -> Any:
        """Submits a job of task "t" with this model vector (default: four zeros)."""
        state = {"w": torch.zeros(4) if vector is None else vector}
        layout = Layout.of(state)
        data = model_bytes(Model(layout, layout.flatten(state)))
        assert (await self.put(data)).complete
        job = parse_job(f'task = "t"\nrounds = {rounds}\n{text}')
        model = Artifact(digest=blake3(data).hexdigest(), size=len(data))
        return await self.stub.SubmitJob(
            operator_pb2.SubmitJobRequest(request_id=request, job_config=job.to_json(), model=model)
        )

    async def fetch(self, digest: str, offset: int = 0) -> bytes:
        """An artifact's bytes."""
        request = DownloadRequest(digest=digest, offset=offset)
        return b"".join([chunk.data async for chunk in self.stub.GetArtifact(request)])

    async def job(self, job: str) -> Any:
        """GetJob."""
        return await self.stub.GetJob(operator_pb2.GetJobRequest(job=job))

    async def watch_until(self, job: str, status: str) -> list[Any]:
        """Follows the job until it has this status; returns all events up to then."""
        events: list[Any] = []
        call = self.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
        async for update in call:
            events.extend(update.events)
            if update.detail.job.status == status:
                call.cancel()
                return events
        raise AssertionError(f"the job ended without being {status}: {[e.message for e in events]}")

    async def watch_for(self, job: str, kind: str) -> Any:
        """Follows the job until an event of this kind; returns the event."""
        call = self.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
        async for update in call:
            for event in update.events:
                if event.kind == kind:
                    call.cancel()
                    return event
        raise AssertionError(f"the job ended without {kind}")

    async def watch_for_round(self, job: str, round: int) -> None:
        """Follows the job until this round is committed."""
        call = self.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
        async for update in call:
            if any(each.kind == "round_committed" and each.round == round for each in update.events):
                call.cancel()
                return
        raise AssertionError(f"the job ended without committing round {round}")


def model_bytes(model: Model) -> bytes:
    """The artifact's bytes."""
    return b"".join(bytes(block) for block in model_blocks(model))
