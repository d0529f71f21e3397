"""A relay's sum on its way in: whose updates are in it their own signatures tell, and then come its bytes.

All members count or none. Where something was decided about one of them meanwhile, it came by itself for
example, the relay is told so and makes the sum anew, so that nobody counts twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from roundtable.core.errors import IdentityError, TransferError
from roundtable.core.failpoints import failpoint
from roundtable.core.identity.signing import verify
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2, relay_pb2
from roundtable.proto.pieces import Piece
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.relayed import RelayedSilos, VoidIdentity
from roundtable.server.door.from_relays import SumOffer, sum_of
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.services import transfer
from roundtable.server.services.upload_receipts import Outcome, Receipts
from roundtable.server.services.uploads import Offer, Uploads, update_in
from roundtable.server.storage.blobs import BlobWriter
from roundtable.server.storage.finite_check import ContentCheck
from roundtable.server.store import ArtifactRow, RelayedSumRow
from roundtable.server.store.rows import to_json

log = logging.getLogger("roundtable.server.services.incoming_sums")

AT_ONCE = 32
"""Members whose signatures are checked before others have their turn."""
MOST_SUMS_AT_ONCE = 8
Receipt = agent_pb2.UploadReceipt


class IncomingSums:
    """Takes relays' sums for all jobs. `authority` is the root's certificate, by which relays are known."""

    def __init__(
        self,
        uploads: Uploads,
        services: JobServices,
        relayed: RelayedSilos,
        receipts: Receipts,
        threads: ThreadPoolExecutor,
        authority: bytes,
    ) -> None:
        self._uploads = uploads
        self._services = services
        self._relayed = relayed
        self._receipts = receipts
        self._threads = threads
        self._authority = authority
        self._places = asyncio.Semaphore(MOST_SUMS_AT_ONCE)

    async def receive(self, relay: str, parts: AsyncIterator[relay_pb2.SumPart]) -> relay_pb2.SumReceipt:
        """Takes a whole sum; the receipt says what became of it and of its members, durably.

        Refusal for what is not signed by the relay, or by silos for which it may speak.
        """
        first = await anext(parts, None)
        if first is None or first.WhichOneof("part") != "header":
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a sum begins with its header")
        offer = sum_of(first.header)
        void = check_signed(self._relayed, self._authority, offer, relay)
        async with self._places:
            return await self._take(relay, offer, parts, void)

    async def _take(
        self, relay: str, offer: SumOffer, parts: AsyncIterator[relay_pb2.SumPart], void: Mapping[str, str]
    ) -> relay_pb2.SumReceipt:
        wanted: list[Offer] = []
        # Or one silo that is revoked while its update is at the relay would cost the region its round.
        decided = {silo: Outcome(Receipt.REJECTED, reason) for silo, reason in void.items()}
        for number, (silo, update) in enumerate(offer.everyone.items(), 1):
            if silo in void:
                continue
            if silo not in self._services.sessions.identities:
                raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"{silo!r} has shown no identity here")
            found = await self._uploads.consider(silo, update, offer.model)
            if isinstance(found, Outcome):
                decided[silo] = found
            else:
                wanted.append(found)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        if decided:
            accepted = [each for each in decided.values() if each.status == Receipt.ACCEPTED]
            return self._told(offer, decided, taken=len(accepted) == len(offer.everyone))
        step, collection = wanted[0].step, wanted[0].runner.collection
        size, check = collection.sum_content(step)
        if problem := _problem(wanted[0], offer, size):
            return relay_pb2.SumReceipt(problem=problem)
        owner = f"{offer.at.job}.{step.round}.{step.attempt}.{relay}.sum"
        if offer.ask:
            received = self._services.artifacts.received(owner, offer.digest)
            return relay_pb2.SumReceipt(offset=min(received, offer.size))
        writer = self._services.artifacts.receive(owner, offer.digest, offer.size, check, offer.offset)
        try:
            with wanted[0].runner.troubles.of_updates():
                await transfer.in_thread(self._threads, writer.open)
                await transfer.receive(pieces_of(parts, step), writer, offer.size, self._threads)
                return await self._complete(relay, offer, wanted, writer, check)
        finally:
            writer.close()

    async def _complete(
        self, relay: str, offer: SumOffer, wanted: list[Offer], writer: BlobWriter, check: ContentCheck
    ) -> relay_pb2.SumReceipt:
        """Checks that the bytes are complete, match the digest and are finite; then all members count."""
        if writer.offset != offer.size:
            raise Refusal(
                grpc.StatusCode.ABORTED,
                f"the sum ended at byte {writer.offset} of {offer.size}; go on from there",
            )
        try:
            await transfer.in_thread(self._threads, writer.check)
        except TransferError as error:
            raise Refusal(
                grpc.StatusCode.DATA_LOSS, f"the sum arrived damaged and was discarded: {error}"
            ) from error
        if flaw := check.flaw(writer.path):
            writer.forget()
            return relay_pb2.SumReceipt(problem=flaw)
        threads = self._services.artifacts.threads(self._threads)
        digest, size = await transfer.in_thread(threads, writer.finish)
        try:
            return await self._deliver(relay, offer, wanted, digest, size)
        finally:
            self._services.artifacts.unpin([digest])

    async def _deliver(
        self, relay: str, offer: SumOffer, wanted: list[Offer], digest: str, size: int
    ) -> relay_pb2.SumReceipt:
        step, runner, now = wanted[0].step, wanted[0].runner, self._services.clock()
        reason = f"in the sum {digest[:12]} of the relay {relay}"
        pairs = [
            (each, update_in(each, digest, self._uploads.figures(each, None, None), relay)) for each in wanted
        ]
        for each in wanted:
            runner.collection.arrived(each.client, each.update, None)
        row = RelayedSumRow(
            step.round, step.attempt, wanted[0].client, relay, digest, now, to_json(_evidence(relay, offer))
        )
        verdict = await runner.inbox.tell(
            m.SumArrived(step, tuple(update for _, update in pairs), _within(relay, offer)),
            (ArtifactRow(digest, size, "update", now),),
            tuple(self._uploads.row(each, update, "accepted", reason) for each, update in pairs),
            (row,),
        )
        if verdict != "wanted":
            # One of them came by another way meanwhile, or the round is over: the relay asks again.
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "not all members of the sum are wanted any more: ask again"
            )
        log.info("a sum of %d updates by the relay %s", len(wanted), relay, extra={"job": offer.at.job})
        failpoint("receipt_due", step.round, step.phase)
        return self._told(offer, {each.client: Outcome(Receipt.ACCEPTED) for each in wanted}, taken=True)

    def _told(self, offer: SumOffer, outcomes: dict[str, Outcome], *, taken: bool) -> relay_pb2.SumReceipt:
        """The receipts of members, each signed for the silo itself."""
        members = [
            relay_pb2.MemberReceipt(
                silo=silo, receipt=self._receipts.give(silo, offer.everyone[silo], outcome)
            )
            for silo, outcome in outcomes.items()
        ]
        return relay_pb2.SumReceipt(taken=taken, members=members)


def _problem(member: Offer, offer: SumOffer, expected: int) -> str:
    """Why a sum can never be taken, in words; empty if nothing is wrong. `expected` are its bytes."""
    if not member.runner.job.regions.sum:
        return "the job does not say that relays add its updates up (regions.sum)"
    if offer.size != expected:
        return f"the sum has {offer.size} bytes; a sum of the job's updates has {expected}"
    return _flaw_within(member, offer)


def _flaw_within(member: Offer, offer: SumOffer) -> str:
    """Why the rounds within the region do not lead from the coordinator's model to the sum; "" if they do."""
    regions, round, model = member.runner.job.regions, member.step.round, member.runner.row.model
    if any(below.within for _, below in offer.sums) or (offer.sums and regions.rounds > 1):
        return "there are no rounds within a region of relays behind each other"
    wanted = list(range(regions.first(round), round))
    if [each.round for each in offer.within] != wanted:
        told = ", ".join(str(number) for number in wanted) or "none"
        return f"the rounds within its region that lead to the sum of round {round} are {told}"
    for each in offer.within:
        if each.model != model:
            return f"round {each.round} began with {each.model[:12]}, and {model[:12]} came before it"
        model = each.made
    return ""


def _within(relay: str, offer: SumOffer) -> m.Within:
    rounds = [(each.round, each.silos, each.examples, each.made) for each in offer.within]
    return {relay: rounds} if rounds else {}


async def pieces_of(parts: AsyncIterator[relay_pb2.SumPart], step: m.Step) -> AsyncIterator[Piece]:
    """The chunks that follow a sum's header; Refusal for anything else."""
    async for part in parts:
        if part.WhichOneof("part") != "chunk":
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "after a sum's header only chunks follow")
        yield Piece(part.chunk.offset, part.chunk.data)
        failpoint("update_part", step.round, step.phase)


def check_signed(relayed: RelayedSilos, authority: bytes, offer: SumOffer, *way: str) -> dict[str, str]:
    """The members whose identities are void, and why. Refusal unless the first relay of `way` has signed the
    sum, each relay behind it its own sum that is in it, and the last one speaks for all silos, each of whose
    ways leads by these relays."""
    void: dict[str, str] = {}
    try:
        values = {**offer.statement, "relay": way[0]}
        signer = verify(offer.certificate, authority, "relay", "sum", values, offer.signature, at=offer.time)
        if signer != way[0]:
            raise IdentityError(f"the sum is signed by {signer!r}")
        for silo in offer.members:
            try:
                relayed.caller(way[-1], silo, way)
            except VoidIdentity as error:
                void[silo] = str(error)
    except (IdentityError, ValueError) as error:
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"the sum of {way[0]!r}: {error}") from error
    for below, each in offer.sums:
        void |= check_signed(relayed, authority, each, below, *way)
    return void


def _evidence(relay: str, offer: SumOffer) -> dict[str, object]:
    """The relay's signed statement, and those of relays behind it."""
    return {
        "purpose": "sum",
        "statement": {**offer.statement, "relay": relay},
        "signature": offer.signature.hex(),
        "certificate": offer.certificate.decode(errors="replace"),
        "sums": [_evidence(below, each) for below, each in offer.sums],
    }
