"""Sends a finished update: from the beginning at first, then from the offset that the coordinator names.

What was delivered is kept while its round lasts, for the case that the coordinator's disk spoils it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from roundtable.client.agent.connection import Backoff, Link, calling
from roundtable.client.agent.spool import Finished, Spool
from roundtable.client.agent.step_reports import StepReporter
from roundtable.client.door import outgoing
from roundtable.client.door.incoming import Receipt, receipt_of, upload_state_of
from roundtable.client.durable_files import digest_of
from roundtable.client.step_key import StepKey, about
from roundtable.core.errors import ProtocolError, ResourceError, TransferError, UnavailableError
from roundtable.core.failpoints import failpoint
from roundtable.core.observability.logs import request_metadata
from roundtable.proto import CHUNK_BYTES, agent_pb2_grpc
from roundtable.proto.pieces import Piece

Sent = Callable[[int, int], None]
Header = Callable[[Finished, int], Any]
_log = logging.getLogger("roundtable.agent")
_SYNC_AFTER_SECONDS = 2.0
_KEPT = 4
_ASKED_AT_MOST = 20


class Delivery:
    """Delivers updates from the spool, however often the connection breaks."""

    def __init__(
        self,
        link: Link,
        spool: Spool,
        reporter: StepReporter,
        sign: Callable[[Any], Any],
        held: Callable[[Finished, Receipt], Awaitable[None]],
    ) -> None:
        """`held` notes that a relay has an update, whose receipt is still to come."""
        self._held = held
        self._link = link
        self._spool = spool
        self._reporter = reporter
        self._sign = sign
        self._delivered: OrderedDict[str, Finished] = OrderedDict()

    async def deliver(self, finished: Finished, fresh: bool) -> Receipt:
        """Sends the update; a fresh one is kept first, against power cuts too if it has to wait.

        Raises ProtocolError where the coordinator does not take it or it cannot be signed, TransferError
        where it is no longer what it was when it was finished.
        """
        keeping = asyncio.create_task(self._keep(finished)) if fresh else None
        try:
            return await self._send(finished, ask=not fresh)
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait([keeping])

    async def receipt(self, finished: Finished) -> Receipt | None:
        """Asks what became of an update that is not delivered any more; None if it is not to be had."""
        backoff = Backoff()
        for _ in range(_ASKED_AT_MOST):
            try:
                stub = await self._link.stub()
                with calling("the receipt could not be fetched"):
                    state = await stub.UploadStatus(
                        self._sign(header_of(finished)), metadata=request_metadata()
                    )
                found = upload_state_of(state, finished.size).receipt
                if found is None or found.status != "held":
                    return found
            except UnavailableError as error:
                _log.info("%s: %s", finished.step, error)
            except ProtocolError as error:
                _log.error("%s: no receipt: %s", finished.step, error)
                return None
            await asyncio.sleep(backoff.next())
        return None

    def delivered(self, finished: Finished) -> None:
        """Notes that the update has arrived; it is kept until the job goes on."""
        self.forget(finished.step.job)
        self._spool.keep(finished.step)
        self._delivered[finished.step.job] = finished
        if len(self._delivered) > _KEPT:
            self.forget(next(iter(self._delivered)))

    def take_back(self, step: StepKey) -> Finished | None:
        """Returns the delivered update of this step, to be sent again; None if it is not kept."""
        kept = self._delivered.get(step.job)
        if kept is None or kept.step != step:
            return None
        del self._delivered[step.job]
        self._spool.take_back(step)
        return kept

    def forget(self, job: str) -> None:
        """Removes what was kept of the job's delivered updates."""
        kept = self._delivered.pop(job, None)
        if kept is not None:
            self._spool.forget(kept.step)

    async def _keep(self, finished: Finished) -> None:
        """Describes the update, so that a kill loses nothing; syncs later, as most are delivered by then."""
        try:
            self._spool.describe(finished)
            await asyncio.sleep(_SYNC_AFTER_SECONDS)
            await asyncio.to_thread(self._spool.sync, finished.step)
        except ResourceError as error:
            _log.warning("%s: a crash before its delivery would lose it: %s", finished.step, error)

    async def _send(self, finished: Finished, ask: bool) -> Receipt:
        step, backoff, place = finished.step, Backoff(), self._spool.bytes_of(finished.step)
        held = False
        while True:
            stub = await self._link.stub()
            self._reporter.transferred(step, "uploading", 0, finished.size)
            try:
                with calling("the upload broke off"):
                    receipt = await upload(
                        stub,
                        finished,
                        place,
                        partial(self._reporter.transferred, step, "uploading"),
                        header=lambda update, offset: self._sign(header_of(update, offset)),
                        ask=ask,
                    )
                if receipt.status != "held":
                    return receipt
                if not held:
                    _log.info("%s: the relay has the update and hands it on", step, extra=about(step))
                    await self._held(finished, receipt)
                held = True
            except UnavailableError as error:
                _log.info("%s: the upload is resumed: %s", step, error, extra=about(step))
                if _damaged(error) and await asyncio.to_thread(digest_of, place) != finished.digest:
                    raise TransferError("the finished update was damaged on the silo's own disk") from error
            ask = True
            await asyncio.sleep(backoff.next())


def _damaged(error: UnavailableError) -> bool:
    """Whether the coordinator rejected the bytes as other than announced."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() == grpc.StatusCode.DATA_LOSS


async def upload(
    stub: agent_pb2_grpc.AgentsAsyncStub,
    update: Finished,
    source: Path,
    sent: Sent,
    *,
    header: Header,
    ask: bool,
) -> Receipt:
    """Sends the update and returns the receipt. With `ask`, resumes behind what has arrived before.

    `header` makes what goes before its bytes from an offset onwards; `sent` is called with (bytes sent, bytes
    in all). Raises grpc's error for a lost connection.
    """
    offset = 0
    if ask:
        state = upload_state_of(
            await stub.UploadStatus(header(update, 0), metadata=request_metadata()), update.size
        )
        if state.receipt is not None:
            return state.receipt
        offset = state.offset
    parts: Any = parts_of(update, source, offset, sent, header(update, offset))
    receipt = receipt_of(await stub.Upload(parts, metadata=request_metadata()))
    failpoint("receipt_here", update.step.round, update.step.phase)
    return receipt


async def parts_of(
    update: Finished, source: Path, offset: int, sent: Sent, header: Any
) -> AsyncIterator[Any]:
    """An upload from an offset onwards: its header, then its bytes."""
    yield header
    with source.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            yield Piece(offset, data)
            offset += len(data)
            sent(offset, update.size)
            failpoint("upload_part", update.step.round, update.step.phase)


def header_of(update: Finished, offset: int = 0) -> Any:
    """What goes before an update's bytes from `offset` onwards, still to be signed."""
    announcement = bytes.fromhex(update.announcement)
    return outgoing.upload_header(
        update.step,
        update.content,
        update.layout,
        update.encoding,
        update.told,
        announcement,
        offset,
        update.model,
        update.arrival,
    )


def log_receipt(step: StepKey, receipt: Receipt) -> None:
    """Logs what became of an update."""
    extra = about(step)
    if receipt.status in ("accepted", "duplicate"):
        _log.info("%s: delivered", step, extra=extra)
    elif receipt.status == "stale":
        reason = receipt.reason or "the step is over"
        _log.info("%s: came too late and is dropped (%s)", step, reason, extra=extra)
    else:
        _log.error("%s: the coordinator rejected the update: %s", step, receipt.reason, extra=extra)
