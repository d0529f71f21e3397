"""Sending a finished update: from the beginning at first, then from where the coordinator says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

from roundtable.client.spool import Finished
from roundtable.core.faults import reach
from roundtable.proto import CHUNK_BYTES, agent_pb2, agent_pb2_grpc, common_pb2

Sent = Callable[[int, int], None]


async def upload(
    stub: agent_pb2_grpc.AgentsAsyncStub, update: Finished, source: Path, sent: Sent, *, ask: bool
) -> agent_pb2.UploadReceipt:
    """Sends the update and returns the receipt. With `ask`, resumes behind what has arrived before.

    `sent` is called with (bytes sent, bytes in all). Raises grpc's error for a lost connection.
    """
    offset = 0
    if ask:
        state = await stub.UploadStatus(update.header())
        if not state.wanted:
            return state.receipt
        offset = state.offset
    receipt = await stub.Upload(_parts(update, source, offset, sent))
    reach("receipt_here", update.step.round, update.step.phase)
    return receipt


async def _parts(
    update: Finished, source: Path, offset: int, sent: Sent
) -> AsyncIterator[agent_pb2.UploadPart]:
    yield agent_pb2.UploadPart(header=update.header(offset))
    with source.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            yield agent_pb2.UploadPart(chunk=common_pb2.Chunk(offset=offset, data=data))
            offset += len(data)
            sent(offset, update.size)
            reach("upload_part", update.step.round, update.step.phase)
