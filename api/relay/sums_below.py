"""Sums of relays behind this one: taken in, checked, and added to what this relay adds up itself.

Nothing of them has to survive a kill: the relay that made one holds its updates until there are receipts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from roundtable.core.errors import TransferError
from roundtable.proto import agent_pb2, relay_pb2
from roundtable.relay.held_updates import HeldSum
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Silos, most_bytes_of
from roundtable.relay.sum_orders import SumTerms
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.relayed import RelayedSilos
from roundtable.server.door.from_relays import SumOffer, sum_of
from roundtable.server.services import transfer
from roundtable.server.services.incoming_sums import check_signed, pieces_of
from roundtable.server.storage.blobs import BlobWriter

MOST_SUMS = 64
"""Of one relay, that are here at a time."""
Ask = Callable[[str, agent_pb2.UploadHeader], Awaitable[agent_pb2.UploadState]]


class SumsBelow:
    """The folder of sums of relays behind this one. `ask` gives the coordinator's word on a silo's update."""

    def __init__(
        self,
        folder: Path,
        silos: Silos,
        relayed: RelayedSilos,
        authority: bytes,
        sums: RelaySums,
        ask: Ask,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._folder = folder
        self._silos = silos
        self._relayed = relayed
        self._authority = authority
        self._sums = sums
        self._ask = ask
        self._threads = threads
        self._here: Counter[str] = Counter()
        self._active = transfer.NewestCalls[relay_pb2.SumReceipt]()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()

    async def receive(self, relay: str, parts: AsyncIterator[relay_pb2.SumPart]) -> relay_pb2.SumReceipt:
        """Takes a sum in and has it added up; what the coordinator has decided about its members.

        Refusal for what is not signed by the relay, or by silos for which it may speak.
        """
        first = await anext(parts, None)
        if first is None or first.WhichOneof("part") != "header":
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a sum begins with its header")
        offer = sum_of(first.header)
        check_signed(self._relayed, self._authority, offer, relay)
        terms = self._terms(offer)
        if terms is None:
            return await self._unordered(offer, first.header)
        if self._here[relay] >= MOST_SUMS:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{MOST_SUMS} sums of this relay are here already")
        self._here[relay] += 1
        held = HeldSum(relay, first.header, offer, self._folder / f"{_slug(relay, offer)}.sum", terms)
        try:
            return await self._active.run(held.path.stem, lambda: self._take(held, parts))
        finally:
            self._here[relay] -= 1

    async def _take(self, held: HeldSum, parts: AsyncIterator[relay_pb2.SumPart]) -> relay_pb2.SumReceipt:
        offer, whole, partial = held.offer, held.path, held.path.with_suffix(".part")
        if not whole.exists():
            if offer.ask:
                return relay_pb2.SumReceipt(offset=partial.stat().st_size if partial.exists() else 0)
            await self._receive(offer, partial, whole, parts)
        elif offer.ask:
            return relay_pb2.SumReceipt(offset=offer.size)
        held.header.offset, held.header.ask = 0, False
        try:
            receipt = await self._sums.outcome_below(held)
        except TransferError as error:
            whole.unlink(missing_ok=True)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        whole.unlink(missing_ok=True)
        return receipt

    async def _receive(
        self, offer: SumOffer, partial: Path, whole: Path, parts: AsyncIterator[relay_pb2.SumPart]
    ) -> None:
        def adopt(path: Path, _: str) -> None:
            path.replace(whole)

        writer = BlobWriter(partial, offer.size, offer.digest, adopt, offset=offer.offset)
        try:
            await transfer.in_thread(self._threads, writer.open)
            await transfer.receive(pieces_of(parts, offer.at.step), writer, offer.size, self._threads)
            if writer.offset != offer.size:
                raise Refusal(
                    grpc.StatusCode.ABORTED,
                    f"the sum ended at byte {writer.offset} of {offer.size}; go on from there",
                )
            await transfer.in_thread(self._threads, writer.finish)
        finally:
            writer.close()

    def _terms(self, offer: SumOffer) -> SumTerms | None:
        """How it is to be added up; None where no order of its step that allows one so large is here."""
        step = offer.at.step
        order = self._sums.order_of((offer.at.job, step.round, step.attempt, step.phase))
        if order is None or offer.size > most_bytes_of(order.model_bytes):
            return None
        return order.terms

    async def _unordered(self, offer: SumOffer, header: relay_pb2.SumHeader) -> relay_pb2.SumReceipt:
        """The answer where no order is here: the round may be over, or this relay has just come back."""
        silo, update = _first(header)
        state = await self._ask(silo, update)
        if not state.wanted:
            decided = relay_pb2.MemberReceipt(silo=silo, receipt=state.receipt)
            return relay_pb2.SumReceipt(members=[decided])
        if any(self._silos.get(name) for name in offer.everyone):
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the order for this sum is not here yet; come again")
        return relay_pb2.SumReceipt(problem="none of its silos is here, and no order for them")


def _first(header: relay_pb2.SumHeader) -> tuple[str, agent_pb2.UploadHeader]:
    """One of the updates in a sum."""
    if header.members:
        return header.members[0].silo, header.members[0].header
    return _first(header.sums[0].header)


def _slug(relay: str, offer: SumOffer) -> str:
    """Part of a file's name: all of it was checked to be words and numbers."""
    at, step = offer.at, offer.at.step
    return f"{relay}.{at.job}.{step.round}.{step.attempt}.{step.phase}.{offer.digest[:16]}"
