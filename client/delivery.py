"""Sending a finished update: from the beginning at first, then from where the coordinator says."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from roundtable.client.spool import Finished
from roundtable.client.steps import StepKey
from roundtable.core.faults import reach
from roundtable.proto import CHUNK_BYTES, agent_pb2, agent_pb2_grpc
from roundtable.proto.pieces import Piece

Sent = Callable[[int, int], None]
_log = logging.getLogger("roundtable.agent")
_Receipt = agent_pb2.UploadReceipt


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
    parts: Any = _parts(update, source, offset, sent)
    receipt = await stub.Upload(parts)
    reach("receipt_here", update.step.round, update.step.phase)
    return receipt


async def _parts(
    update: Finished, source: Path, offset: int, sent: Sent
) -> AsyncIterator[agent_pb2.UploadHeader | Piece]:
    yield update.header(offset)
    with source.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            yield Piece(offset, data)
            offset += len(data)
            sent(offset, update.size)
            reach("upload_part", update.step.round, update.step.phase)


def tell(step: StepKey, receipt: agent_pb2.UploadReceipt) -> None:
    """What became of an update, in the silo's log."""
    if receipt.status in (_Receipt.ACCEPTED, _Receipt.DUPLICATE):
        _log.info("%s: delivered", step)
    elif receipt.status == _Receipt.STALE:
        _log.info("%s: came too late and is dropped (%s)", step, receipt.reason or "the step is over")
    else:
        _log.error("%s: the coordinator rejected the update: %s", step, receipt.reason)
