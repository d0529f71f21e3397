"""Hands held updates on to the coordinator, under their silos' names, until it has decided about each."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from roundtable.client.agent.connection import PASSING, Backoff, Link
from roundtable.client.durable_files import digest_of
from roundtable.core.errors import TransferError
from roundtable.core.failpoints import failpoint
from roundtable.core.machine.file_access import PLAIN_READ, read_at
from roundtable.core.observability.logs import request_metadata, requesting
from roundtable.proto import CHUNK_BYTES, agent_pb2
from roundtable.proto.pieces import Piece
from roundtable.relay.held_updates import Held, Key, RelaySpool
from roundtable.relay.relay_sums import RelaySums
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.relayed import SILO_KEY

log = logging.getLogger("roundtable.relay")

AT_ONCE = 8
"""Calls for silos that are open at a time. gRPC takes calls in one by one, so a command at the coordinator
waits behind all that have come: more than keep it busy help no update, and hold everybody up."""
DENIALS = 5
HELD_SECONDS = 5.0
"""At most, between two questions to a relay above that holds the update: it waits for the receipt too."""


class Forwarding:
    """One task for each update that is held."""

    def __init__(self, link: Link, spool: RelaySpool, vouch: Callable[[Held], None], sums: RelaySums) -> None:
        """`vouch` shows the coordinator again that the relay may speak for the update's silo; `sums` adds
        those up that are to be."""
        self._sums = sums
        self._link = link
        self._spool = spool
        self._vouch = vouch
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[Key, asyncio.Task[agent_pb2.UploadReceipt]] = {}
        self._held: dict[Key, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def held(self, key: Key) -> Held | None:
        """The update of this step that is held."""
        return self._held.get(key)

    def all(self) -> list[Held]:
        """Every update that is held."""
        return list(self._held.values())

    def of_silo(self, silo: str) -> int:
        """How many updates of a silo are held."""
        return sum(held.silo == silo for held in self._held.values())

    def start(self, held: Held, *, fresh: bool) -> None:
        """Begins to hand an update on; in the place of another one of the same step."""
        key = held.key
        if (older := self._tasks.get(key)) is not None:
            older.cancel()
        self._held[key] = held
        task = asyncio.create_task(self._hand_on(held, fresh))
        self._tasks[key] = task
        task.add_done_callback(lambda task: self._ended(key, task))

    async def receipt(self, key: Key, seconds: float) -> agent_pb2.UploadReceipt | None:
        """The coordinator's receipt, once it is there; None where it takes longer.

        Refusal where the coordinator does not take the update, TransferError where it was damaged here.
        """
        task = self._tasks[key]
        done, _ = await asyncio.wait([task], timeout=seconds)
        return task.result() if done and not task.cancelled() else None

    async def close(self) -> None:
        """Ends all tasks; what is held is handed on after the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: Key, task: asyncio.Task[agent_pb2.UploadReceipt]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key], self._held[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the update of %s for %s, round %d: %s", *key[:3], error)

    async def _hand_on(self, held: Held, fresh: bool) -> agent_pb2.UploadReceipt:
        if (decided := await self._summed(held)) is not None:
            return decided
        gone, above = Backoff(), Backoff(1.0, HELD_SECONDS)
        denied, ask = 0, not fresh
        while True:
            backoff = gone
            stub = await self._link.stub()
            try:
                with requesting():
                    async with self._turns:
                        receipt = await self._send(stub, held, ask)
                if receipt.status != agent_pb2.UploadReceipt.HELD:
                    self._spool.remove(held)
                    return receipt
                backoff, problem = above, "the relay above has it, and not yet the coordinator's receipt"
            except grpc.aio.AioRpcError as error:
                problem, code = f"{error.details()} ({error.code().name})", error.code()
                denied += code is grpc.StatusCode.PERMISSION_DENIED
                if code is grpc.StatusCode.DATA_LOSS and await self._damaged(held):
                    self._spool.remove(held)
                    raise TransferError("the update was damaged at the relay; send it again") from error
                if code is grpc.StatusCode.PERMISSION_DENIED and denied < DENIALS:
                    self._vouch(held)
                elif code not in PASSING:
                    self._spool.remove(held)
                    raise Refusal(code, str(error.details())) from error
            except grpc.aio.UsageError:
                problem = "the connection was closed meanwhile"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                problem = "the connection is gone"
            log.info("the update of %s is handed on again: %s", held.silo, problem, extra={"site": held.silo})
            ask = True
            await asyncio.sleep(backoff.next())

    async def _summed(self, held: Held) -> agent_pb2.UploadReceipt | None:
        """The receipt for an update that has gone up in a sum; None for one that is to go by itself."""
        try:
            receipt = await self._sums.outcome(held)
        except TransferError:
            self._spool.remove(held)
            raise
        if receipt is not None:
            step = held.offer.at.step
            failpoint("receipt_handed_on", step.round, step.phase)
            self._spool.remove(held)
        return receipt

    async def _send(self, stub: Any, held: Held, ask: bool) -> agent_pb2.UploadReceipt:
        metadata, offset = for_silo(held.silo), 0
        if ask:
            state = await stub.UploadStatus(held.header, metadata=metadata)
            if not state.wanted:
                decided: agent_pb2.UploadReceipt = state.receipt
                return decided
            offset = min(state.offset, held.offer.size)
        receipt: agent_pb2.UploadReceipt = await stub.Upload(_parts(held, offset), metadata=metadata)
        step = held.offer.at.step
        failpoint("receipt_handed_on", step.round, step.phase)
        return receipt

    @staticmethod
    async def _damaged(held: Held) -> bool:
        return await asyncio.to_thread(digest_of, held.path) != held.offer.digest


def for_silo(silo: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that the relay makes for a silo."""
    return *request_metadata(), (SILO_KEY, silo)


async def _parts(held: Held, offset: int) -> AsyncIterator[Any]:
    header = agent_pb2.UploadHeader()
    header.CopyFrom(held.header)
    header.offset = offset
    yield header
    file = os.open(held.path, PLAIN_READ)
    try:
        while data := await asyncio.to_thread(read_at, file, CHUNK_BYTES, offset):
            yield Piece(offset, data)
            offset += len(data)
    finally:
        os.close(file)
