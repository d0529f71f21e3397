"""Adds up the updates of a region's silos, and the sums of relays behind this one, and sends sums in their
place, step by step.

A sum is closed once every silo that is connected and was asked has delivered or said that it will not, or
when its order's time is over; what comes later goes into another one. After a restart what is held is summed
at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.client.agent.connection import PASSING, Backoff, Link
from roundtable.client.durable_files import digest_of
from roundtable.core.errors import ResourceError, TransferError
from roundtable.core.foreign_text import printable
from roundtable.core.machine.file_access import PLAIN_READ, read_at
from roundtable.core.observability.logs import request_metadata, requesting
from roundtable.proto import CHUNK_BYTES, agent_pb2, common_pb2, relay_pb2
from roundtable.relay.held_updates import Held, HeldSum, Part
from roundtable.relay.made_sums import ANEW, TAKEN, FromRegion, MadeSum, SumSpool
from roundtable.relay.silos import Asked, Silos, asked_in
from roundtable.relay.sum_orders import SumOrder
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.services import transfer

log = logging.getLogger("roundtable.relay")

DENIALS = 5
MOST_STEPS = 256


@dataclass(frozen=True)
class _Waiting:
    """What is to be added up, and who waits for the `answer` about it."""

    part: Part
    outcome: asyncio.Future[Any]


class _StepSums:
    """One step: who was asked and has not answered, what waits to be added up, what was made of it."""

    def __init__(self) -> None:
        self.awaited: set[str] = set()
        self.returning: set[str] = set()
        self.order: SumOrder | None = None
        self.closes = self.blind = self.grace = self.patience = 0.0
        self.waiting: dict[str, _Waiting] = {}
        self.made: list[MadeSum] = []
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def settle(self, part: Part, told: Mapping[str, agent_pb2.UploadReceipt], problem: str = "") -> None:
        """Answers who waits for this part; of another one of the name nothing was decided."""
        waits = self.waiting.get(part.name)
        if waits is not None and waits.part == part:
            del self.waiting[part.name]
            if not waits.outcome.done():
                waits.outcome.set_result(part.answer(told, problem))


class Region(Protocol):
    """Whoever takes the sums of rounds within the region (`regional.py`)."""

    async def take(self, made: MadeSum) -> relay_pb2.SumReceipt | None:
        """The receipt for a sum that stays here; None for one of the coordinator's."""

    async def part(self, asked: Asked) -> FromRegion | None:
        """What goes along with a sum of this step."""

    def is_within(self, asked: Asked) -> bool:
        """Whether updates of this step stay here."""

    def is_over(self, asked: Asked) -> bool:
        """Whether it is decided about them."""

    def receipt(self, silo: str, offer: UploadOffer) -> agent_pb2.UploadReceipt | None:
        """The receipt for an update about which was decided there."""

    def refused(self, part: Part, problem: str) -> dict[str, agent_pb2.UploadReceipt]:
        """Receipts for updates that stay here and can be part of no sum."""


class RelaySums:
    """The sums of all steps. `link` gives the coordinator's calls for relays; `vouch` shows it again that the
    relay may speak for an update's silo."""

    def __init__(
        self,
        link: Link,
        spool: SumSpool,
        silos: Silos,
        vouch: Callable[[Part], None],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._link = link
        self._spool = spool
        self._silos = silos
        self._vouch = vouch
        self._threads = threads
        self.region: Region | None = None
        self._steps: OrderedDict[Asked, _StepSums] = OrderedDict()

    def recover(self) -> None:
        """Takes up the sums that an earlier process has made. Blocks."""
        for made in self._spool.recover():
            at = made.offer.at
            self._step((at.job, at.step.round, at.step.attempt, at.step.phase)).made.append(made)

    def start(self) -> None:
        """Sends what was taken up."""
        for step in list(self._steps.values()):
            self._go_on(step)

    def ordered(self, silo: str, asked: Asked, order: SumOrder) -> None:
        """A silo was asked for an update of this step; the first order says when its sum is closed."""
        step = self._step(asked)
        step.order = order
        step.closes = step.closes or time.monotonic() + order.seconds
        step.returning.discard(silo)
        if silo not in step.waiting:
            step.awaited.add(silo)

    def expect(self, asked: Asked, patience: float, blind: float = 0.0) -> None:
        """Has a sum of this step wait `patience` seconds for a silo that has left, and `blind` from now for
        whoever has had no order yet."""
        step = self._step(asked)
        step.patience, step.blind = patience, max(step.blind, time.monotonic() + blind)

    def go_on(self, asked: Asked, patience: float, seconds: float, silos: Collection[str]) -> None:
        """After a restart: a sum of this step waits `patience` seconds for these silos to come back, or where
        there are none for whoever comes, and is closed after `seconds`."""
        step, now = self._step(asked), time.monotonic()
        step.patience, step.closes = patience, now + max(seconds, patience)
        step.returning.update(silos)
        if silos:
            step.grace = now + patience
        else:
            step.blind = now + patience

    def waits_for(self, silo: str, asked: Asked) -> bool:
        """Whether the silo's update of this step is here and waits to be added up."""
        step = self._steps.get(asked)
        return step is not None and silo in step.waiting

    def works_on(self, asked: Asked) -> bool:
        """Whether there is anything to be added up, or a sum about which nothing is decided."""
        step = self._steps.get(asked)
        return step is not None and bool(step.waiting or step.made)

    def order_of(self, asked: Asked) -> SumOrder | None:
        """What was said of adding this step's updates up, whoever was asked and is here now."""
        step = self._steps.get(asked)
        return step.order if step is not None else None

    def excused(self, silo: str, asked: Asked) -> None:
        """The silo will not deliver: it has said so, or is asked for it no more."""
        if (step := self._steps.get(asked)) is not None:
            step.awaited.discard(silo)
            step.returning.discard(silo)
            step.changed.set()

    def left(self) -> None:
        """A silo's stream has ended: it is not waited for before it is back."""
        for step in self._steps.values():
            step.grace = time.monotonic() + step.patience
            step.changed.set()

    async def outcome(self, held: Held) -> agent_pb2.UploadReceipt | None:
        """The coordinator's receipt for an update that was added up; None for one that is to be handed on.

        TransferError where it was damaged here.
        """
        if held.terms is None:
            return None
        if self.region is not None and self.region.is_over(asked_in(held.offer)):
            return self.region.receipt(held.silo, held.offer)
        receipt: agent_pb2.UploadReceipt | None = await self._answered(held)
        return receipt

    async def outcome_below(self, held: HeldSum) -> relay_pb2.SumReceipt:
        """What the relay behind this one is told of its sum. TransferError where it was damaged here."""
        receipt: relay_pb2.SumReceipt = await self._answered(held)
        return receipt

    async def _answered(self, part: Part) -> Any:
        at = part.offer.at
        step = self._step((at.job, at.step.round, at.step.attempt, at.step.phase))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waits = step.waiting[part.name] = _Waiting(part, future)
        step.awaited.difference_update(part.members)
        step.returning.difference_update(part.members)
        step.changed.set()
        self._go_on(step)
        try:
            return await future
        finally:
            if step.waiting.get(part.name) is waits:
                del step.waiting[part.name]

    @property
    def undecided(self) -> int:
        """Sums that are made, and about which nothing was decided yet."""
        return sum(len(step.made) for step in self._steps.values())

    async def close(self) -> None:
        """Ends all work; what is held is added up after the next start."""
        tasks = [step.task for step in self._steps.values() if step.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _step(self, asked: Asked) -> _StepSums:
        step = self._steps.setdefault(asked, _StepSums())
        self._steps.move_to_end(asked)
        idle = [key for key, each in self._steps.items() if not each.waiting and not each.made]
        for key in idle[: max(0, len(self._steps) - MOST_STEPS)]:
            if key != asked:
                del self._steps[key]
        return step

    def _go_on(self, step: _StepSums) -> None:
        if (step.waiting or step.made) and (step.task is None or step.task.done()):
            step.task = asyncio.create_task(self._work(step))

    async def _work(self, step: _StepSums) -> None:
        try:
            while step.waiting or step.made:
                if not step.made:
                    await self._due(step)
                    await self._make(step)
                else:
                    await self._send(step, step.made[0])
                    step.made.pop(0)
        except Exception:
            log.exception("updates cannot be added up, and are handed on as they are")
            step.made.clear()
            for waits in list(step.waiting.values()):
                self._refuse(step, waits.part, "it cannot be added up: the relay's log says why")

    def _refuse(self, step: _StepSums, part: Part, problem: str) -> None:
        """An update can be part of no sum: it is handed on, if not one of a round within the region."""
        within = self.region is not None and self.region.is_within(asked_in(part.offer))
        step.settle(part, self.region.refused(part, problem) if within and self.region else {}, problem)

    async def _due(self, step: _StepSums) -> None:
        """Waits until a sum is to be closed."""
        while step.waiting:
            now = time.monotonic()
            waits = [] if any(self._silos.get(silo) for silo in step.awaited) else [step.blind]
            if waits and (step.awaited or step.returning):
                waits.append(step.grace)
            left = min(step.closes, max(waits, default=step.closes)) - now
            if left <= 0:
                return
            step.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await step.changed.wait()

    async def _make(self, step: _StepSums) -> None:
        here = [waits.part for waits in step.waiting.values()]
        if not here or here[0].terms is None:
            return
        try:
            region = await self.region.part(asked_in(here[0].offer)) if self.region is not None else None
            summed = await transfer.in_thread(self._threads, self._spool.make, here, here[0].terms, region)
        except DamagedRows as error:
            for name, waits in list(step.waiting.items()):
                if waits.part.offer.digest in error.digests:
                    del step.waiting[name]
                    waits.outcome.set_exception(TransferError("it was damaged at the relay; send it again"))
            return
        except ResourceError as error:
            log.error("%s; trying again", error)
            await asyncio.sleep(1.0)
            return
        for each in summed.odd:
            log.warning("what came from %s cannot be added up", each.name)
            self._refuse(step, each, "it is not what the job asks for, or not finite")
        if summed.made is not None:
            step.made.append(summed.made)

    async def _send(self, step: _StepSums, made: MadeSum) -> None:
        """Sends a sum until the coordinator has decided about it, and tells those who wait."""
        receipt = await self.region.take(made) if self.region is not None else None
        if receipt is None:
            there = made.path.exists()
            receipt = await self._until_decided(step, made) if there else relay_pb2.SumReceipt()
        if receipt is None:
            return
        decided = {each.silo: each.receipt for each in receipt.members if each.silo in made.members}
        problem = printable(receipt.problem, 500)
        if not decided and not problem:
            problem = "the coordinator has decided nothing about it"
        if problem:
            log.warning("the sum of %d updates is not taken: %s", len(made.members), problem)
        outcome = problem or (TAKEN if receipt.taken else f"{ANEW} without some of its members")
        await transfer.in_thread(self._threads, self._spool.remove, made, outcome)
        for part in [waits.part for waits in step.waiting.values()]:
            if all(made.members.get(silo) == update.digest for silo, update in part.members.items()):
                told = {silo: decided[silo] for silo in part.members if silo in decided}
                if told:
                    step.settle(part, told)
                elif problem:
                    self._refuse(step, part, problem)

    async def _until_decided(self, step: _StepSums, made: MadeSum) -> relay_pb2.SumReceipt | None:
        """The coordinator's receipt; None where the sum was damaged here, and is made anew."""
        backoff, denied = Backoff(), 0
        while True:
            stub: Any = await self._link.stub()
            try:
                with requesting():
                    answer: relay_pb2.SumReceipt = await stub.Sum(
                        _parts(made, 0, ask=True), metadata=request_metadata()
                    )
                    if not answer.members and not answer.problem:
                        offset = min(answer.offset, made.offer.size)
                        answer = await stub.Sum(_parts(made, offset), metadata=request_metadata())
                return answer
            except grpc.aio.AioRpcError as error:
                problem, code = f"{error.details()} ({error.code().name})", error.code()
                if code is grpc.StatusCode.DATA_LOSS and await self._damaged(made):
                    await transfer.in_thread(
                        self._threads, self._spool.remove, made, f"{ANEW}: damaged at the relay"
                    )
                    return None
                denied += code is grpc.StatusCode.PERMISSION_DENIED
                if code is grpc.StatusCode.PERMISSION_DENIED and denied < DENIALS:
                    for waits in step.waiting.values():
                        self._vouch(waits.part)
                elif code not in PASSING:
                    return relay_pb2.SumReceipt(problem=problem)
            except grpc.aio.UsageError:
                problem = "the connection was closed meanwhile"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                problem = "the connection is gone"
            log.info("the sum of %d updates is sent again: %s", len(made.members), problem)
            await asyncio.sleep(backoff.next())

    @staticmethod
    async def _damaged(made: MadeSum) -> bool:
        return await asyncio.to_thread(digest_of, made.path) != made.offer.digest


async def _parts(made: MadeSum, offset: int, *, ask: bool = False) -> AsyncIterator[relay_pb2.SumPart]:
    header = relay_pb2.SumHeader()
    header.CopyFrom(made.header)
    header.offset = offset
    header.ask = ask
    yield relay_pb2.SumPart(header=header)
    if ask:
        return
    file = os.open(made.path, PLAIN_READ)
    try:
        while data := await asyncio.to_thread(read_at, file, CHUNK_BYTES, offset):
            yield relay_pb2.SumPart(chunk=common_pb2.Chunk(offset=offset, data=data))
            offset += len(data)
    finally:
        os.close(file)
