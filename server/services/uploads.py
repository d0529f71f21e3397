"""An update's way in: checked before its bytes are accepted, resumed, acknowledged once durable."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from roundtable.core.errors import SiteFailure, TransferError
from roundtable.core.failpoints import failpoint
from roundtable.core.observability.released import Tells, is_told
from roundtable.core.observability.transfer_figures import TransferFigures
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2
from roundtable.proto.pieces import Piece
from roundtable.server.auth.access import Refusal, principal
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.door.from_agents import offer_of
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.jobs.sessions import Identity
from roundtable.server.services import transfer
from roundtable.server.services.upload_receipts import (
    Outcome,
    Receipt,
    Receipts,
    settled,
    signed_statement,
    unsigned,
)
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.blobs import BlobWriter
from roundtable.server.storage.finite_check import ContentCheck, EncodedCheck
from roundtable.server.store import ArtifactRow, UpdateRow
from roundtable.server.store.jobs import receipt_of

log = logging.getLogger("roundtable.server.services.uploads")

MOST_CORRUPTIONS = 3
ALONE = "the update goes on from a region's model (regions.rounds), and counts only in the sum of its relay"
UNKNOWN = "an update comes before its silo since this coordinator was started: open the control stream first"
"""Or who holds the key of its connection alone would be believed without a signature."""
Part = Piece | agent_pb2.UploadHeader | None


@dataclass(frozen=True)
class Offer:
    """An upload that is wanted: who offers it, and for which step of which job."""

    client: str
    update: UploadOffer
    runner: JobRunner
    identity: Identity | None

    @property
    def step(self) -> m.Step:
        return self.update.at.step

    @property
    def owner(self) -> str:
        """Names the partial file; job, round and attempt come first, as a prefix for all of a round."""
        step = self.step
        return f"{self.update.at.job}.{step.round}.{step.attempt}.{self.client}"


class Uploads:
    """Receives updates for all jobs."""

    def __init__(
        self,
        jobs: JobRegistry,
        services: JobServices,
        threads: ThreadPoolExecutor,
        authority: bytes,
        receipts: Receipts,
    ) -> None:
        """`authority` is the root's certificate: it vouches for who signs updates."""
        self._receipts = receipts
        self._jobs = jobs
        self._authority = authority
        self._services = services
        self._threads = threads
        self._active = transfer.NewestCalls[Outcome]()
        self._corrupted: Counter[str] = Counter()
        self._turnstile = transfer.Turnstile()

    async def status(self, client: str, update: UploadOffer) -> agent_pb2.UploadState:
        """How much has arrived, and whether the rest is wanted.

        Who names no layout has no bytes to send any more, and asks for the receipt alone, if there is one.
        """
        if not update.layout:
            return await self._receipt_alone(client, update)
        offer = await self.consider(client, update)
        if isinstance(offer, Outcome):
            return agent_pb2.UploadState(receipt=self._receipts.give(client, update, offer))
        received = self._services.artifacts.received(offer.owner, update.digest)
        summed = offer.runner.job.regions.sum
        return agent_pb2.UploadState(offset=min(received, update.size), wanted=True, summed=summed)

    async def _receipt_alone(self, client: str, update: UploadOffer) -> agent_pb2.UploadState:
        job, step = update.at.job, update.at.step
        decided = await self._services.database.read(
            lambda connection: receipt_of(connection, job, step.round, step.attempt, client)
        )
        if decided is None:
            return agent_pb2.UploadState(wanted=True)
        return agent_pb2.UploadState(receipt=self._receipts.give(client, update, settled(decided, update)))

    async def receive(self, client: str, parts: AsyncIterator[Part]) -> Receipt:
        """Takes a whole upload; the receipt says what became of the update, durably."""
        update = await _header(parts)
        outcome = await self._outcome(client, update, parts)
        runner = self._jobs.runner(update.at.job)
        if runner is not None and runner.tells_cohorts:
            result = "duplicate" if outcome.again else to_agents.RESULTS[outcome.status]
            self._services.observer.answered(result)
        return self._receipts.give(client, update, outcome)

    async def _outcome(self, client: str, update: UploadOffer, parts: AsyncIterator[Part]) -> Outcome:
        offer = await self.consider(client, update)
        if isinstance(offer, Outcome):
            return offer
        return await self._active.run(offer.owner, lambda: self._take(offer, parts))

    async def consider(self, client: str, update: UploadOffer, model: str = "") -> Offer | Outcome:
        """Returns the offer if its bytes are wanted; otherwise what became of it. `model` is that of the
        silo's region, where the update is to be one from that and not from the coordinator's."""
        job, step = update.at.job, update.at.step
        runner = self._jobs.runner(job)
        verdict = runner.wants(client, step) if runner else "stale"
        if runner is None or verdict != "wanted":
            return await self._settled(client, update, verdict)
        if client not in self._services.sessions.known:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, UNKNOWN)
        offer = Offer(client, update, runner, self._services.sessions.identities.get(client))
        alone = not model and runner.job.regions.first(step.round) != step.round
        asked = model or ("" if alone else runner.instructions.model_of(client, step))
        if forged := unsigned(update, offer.identity, asked, client, self._authority):
            # No receipt: whoever took the silo's connection over must spoil nothing that the silo will send.
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, forged)
        problem = ALONE if alone else _problem(client, update, runner)
        if problem:
            return await self._reject(offer, "invalid_update", problem)
        first = runner.lost(client, step)
        if first and update.digest != first:
            problem = (
                f"the update {first[:12]} was accepted and damaged since, and another one came in its place, "
                f"{update.digest[:12]}: what was acknowledged is not replaced"
            )
            return await self._reject(offer, "data_corruption", problem)
        return offer

    async def _settled(self, client: str, update: UploadOffer, verdict: str) -> Outcome:
        """Answers for a step that is not waited for, with what was decided about it before, if anything."""
        job, step = update.at.job, update.at.step
        decided = await self._services.database.read(
            lambda connection: receipt_of(connection, job, step.round, step.attempt, client)
        )
        if decided is not None:
            return settled(decided, update)
        if verdict == "duplicate":
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE,
                "this update has arrived and is being written down: ask again",
            )
        runner = self._jobs.runner(job)
        reason = runner.refusal(client, step) if runner else f"the job {job} is not running"
        return Outcome(Receipt.STALE, reason)

    async def _take(self, offer: Offer, parts: AsyncIterator[Part]) -> Outcome:
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._turnstile.passing())
            return await self._take_in(offer, parts, place)

    async def _take_in(self, offer: Offer, parts: AsyncIterator[Part], place: AsyncExitStack) -> Outcome:
        update, artifacts = offer.update, self._services.artifacts
        await offer.runner.receive(offer.client, offer.step, update.digest)
        check = offer.runner.collection.content_check(offer.client, offer.update)
        offer.runner.inbox.post(m.WorkStarted(offer.client, offer.step, "uploading"))
        began = time.monotonic()
        writer = artifacts.receive(offer.owner, update.digest, update.size, check, update.offset)
        try:
            with offer.runner.troubles.of_updates():
                await transfer.in_thread(self._threads, _open, artifacts, offer.owner, update.digest, writer)
                await transfer.receive(_pieces(parts, offer.step), writer, update.size, self._threads)
                return await self._complete(offer, writer, check, time.monotonic() - began, place)
        finally:
            writer.close()

    async def _complete(
        self, offer: Offer, writer: BlobWriter, check: ContentCheck, seconds: float, place: AsyncExitStack
    ) -> Outcome:
        """Checks that the bytes are complete, match the digest and are finite; then keeps them. They took
        `seconds`. `place` is given back before the job has taken the update."""
        size = offer.update.size
        if writer.offset != size:
            raise Refusal(
                grpc.StatusCode.ABORTED,
                f"the upload ended at byte {writer.offset} of {size}; go on from there",
            )
        arrived, artifacts = _Arrived(writer, check), self._services.artifacts
        try:
            # One visit to a thread where one is enough: a bucket's own threads do nothing but wait for it.
            await transfer.in_thread(self._threads, arrived.judge, artifacts.bucket is None)
            if arrived.damage is not None:
                return await self._corrupted_upload(offer, arrived.damage)
            figures = self.figures(offer, seconds, arrived.decoded)
            if arrived.flaw:
                return await self._reject(offer, "invalid_update", arrived.flaw)
            if not arrived.digest:
                await transfer.in_thread(artifacts.threads(self._threads), arrived.keep)
            await place.aclose()
            row = ArtifactRow(arrived.digest, size, "update", self._services.clock())
            offer.runner.collection.arrived(offer.client, offer.update, check.norm)
            return await self._deliver(offer, row, figures)
        finally:
            if arrived.digest:
                artifacts.unpin([arrived.digest])

    async def _deliver(self, offer: Offer, artifact: ArtifactRow, figures: TransferFigures) -> Outcome:
        offered, client = offer.update, offer.client
        if offer.runner.tells_cohorts:
            self._services.links.travelled(client, figures)
        update = update_in(offer, artifact.digest, figures)
        event = m.UpdateArrived(offer.step, update)
        verdict = await offer.runner.inbox.tell(
            event, (artifact,), (self.row(offer, update, "accepted", ""),)
        )
        if verdict == "wanted":
            self._corrupted.pop(offer.owner, None)
            failpoint("receipt_due", offer.step.round, offer.step.phase)
            return Outcome(Receipt.ACCEPTED)
        return await self._settled(client, offered, verdict)

    def figures(self, offer: Offer, received: float | None, decoded: float | None) -> TransferFigures:
        """What the update's way took. A part of an upload, or a relay's line, tells nothing of the silo's."""
        update, runner = offer.update, offer.runner
        sent = runner.instructions.take_sent(offer.client)
        model = runner.instructions.model_of(offer.client, offer.step)
        direct = principal().source != "relay"
        told = update.writing if is_told(runner.job.privacy, Tells.SILO) else None
        agreed = sent.size > 0 and sent.size == update.arrival.size
        return TransferFigures(
            up=update.size,
            up_plain=4 * runner.layout.sent.size,
            down=sent.size,
            down_plain=(self._services.artifacts.size(model) or 0) if sent.size and model else 0,
            up_seconds=received if direct and not update.offset else None,
            # A silo that says less than the bytes took to leave here is not believed.
            down_seconds=max(sent.seconds, update.arrival.seconds) if agreed else None,
            encoding_seconds=told.seconds if told else None,
            decoding_seconds=decoded,
            error=told.error if told else None,
            encoding=update.encoding if runner.job.transfer.automatic else "",
            trials=told.trials if told else (),
        )

    async def _corrupted_upload(self, offer: Offer, error: TransferError) -> Outcome:
        """Asks for the bytes again, from the first; after a few times rejects the update."""
        self._corrupted[offer.owner] += 1
        problem = f"the update arrived damaged and was discarded: {error}"
        if self._corrupted[offer.owner] < MOST_CORRUPTIONS:
            failure = _failure(offer, "data_corruption", problem)
            offer.runner.inbox.post(m.Troubled(offer.step, failure, "asked the silo to send it again"))
            raise TransferError(f"{problem}; send it again from the start")
        count = self._corrupted.pop(offer.owner)
        return await self._reject(offer, "data_corruption", f"{problem}; it was sent {count} times")

    async def _reject(self, offer: Offer, kind: str, problem: str) -> Outcome:
        """Tells the round why this silo's update is missing, and the silo not to send it again."""
        step, client = offer.step, offer.client
        log.warning("update refused: %s", problem, extra={"job": offer.update.at.job, "site": client})
        failure = _failure(offer, kind, problem)
        update = m.Update(client, m.BlobReference(offer.update.digest), _examples(offer))
        row = self.row(offer, update, "rejected", problem)
        await offer.runner.inbox.tell(m.ClientFailed(step, failure), (), (row,))
        return Outcome(Receipt.REJECTED, problem)

    def row(self, offer: Offer, update: m.Update, receipt: str, reason: str) -> UpdateRow:
        return UpdateRow(
            round=offer.step.round,
            attempt=offer.step.attempt,
            client=offer.client,
            digest=offer.update.digest,
            size=offer.update.size,
            examples=update.examples,
            loss=update.loss,
            metrics=update.metrics,
            receipt=receipt,
            reason=reason,
            received=self._services.clock(),
            statement=signed_statement(offer.update, offer.identity, offer.client),
        )


def update_in(offer: Offer, digest: str, figures: TransferFigures, relay: str = "") -> m.Update:
    """The update of an offer as the round takes it; its vector, or that of the sum of `relay` in which it
    lies, is in the artifact `digest`."""
    # What must not be told is not kept: an honest agent does not send it.
    told = is_told(offer.runner.job.privacy, Tells.SILO)
    metrics = dict(offer.update.metrics) if told else {}
    total, count = metrics.pop("loss", (0.0, 0))
    return m.Update(
        offer.client,
        m.BlobReference(digest),
        _examples(offer),
        total / count if count else None,
        metrics,
        transfer=figures,
        relay=relay,
    )


class _Arrived:
    """An upload whose bytes are all here: what is wrong with them, or the digest under which they are kept,
    pinned. Its methods block."""

    def __init__(self, writer: BlobWriter, check: ContentCheck) -> None:
        self._writer = writer
        self._check = check
        self.damage: TransferError | None = None
        self.flaw = ""
        self.decoded: float | None = None
        self.digest = ""

    def judge(self, keep: bool) -> None:
        """Checks digest and content; with `keep` keeps it where nothing is wrong."""
        try:
            self._writer.check()
        except TransferError as error:
            self.damage = error
            return
        began = time.monotonic()
        self.flaw = self._check.flaw(self._writer.path)
        if isinstance(self._check, EncodedCheck):
            self.decoded = time.monotonic() - began
        if self.flaw:
            self._writer.forget()
        elif keep:
            self.keep()

    def keep(self) -> None:
        """Durable, under its name, when this returns."""
        self.digest, _ = self._writer.finish()


def _open(artifacts: ArtifactStore, owner: str, digest: str, writer: BlobWriter) -> None:
    """Begins an upload, and deletes halves of other updates for the same step: a silo has one for it."""
    for other in artifacts.unfinished(owner):
        if other != digest:
            artifacts.drop(owner, other)
    writer.open()


def _examples(offer: Offer) -> int:
    """The example count of an update, or 1 where it must not be told."""
    count = offer.update.examples
    return count if is_told(offer.runner.job.privacy, Tells.SILO) else min(count, 1)


def _failure(offer: Offer, kind: str, problem: str) -> SiteFailure:
    step = offer.step
    return SiteFailure(offer.client, step.round, step.attempt, step.phase, kind, problem)


async def _header(parts: AsyncIterator[Part]) -> UploadOffer:
    async for part in parts:
        if isinstance(part, agent_pb2.UploadHeader):
            return offer_of(part)
        break
    raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "an upload begins with its header")


async def _pieces(parts: AsyncIterator[Part], step: m.Step) -> AsyncIterator[Piece]:
    async for part in parts:
        if not isinstance(part, Piece):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "after an upload's header only chunks follow")
        yield part
        failpoint("update_part", step.round, step.phase)


def _problem(client: str, update: UploadOffer, runner: JobRunner) -> str:
    """What is wrong with an offer, in words; empty if nothing is."""
    layout = runner.layout
    if update.layout != layout.fingerprint:
        return (
            f"the update's layout {update.layout[:12]!r} is not the job's, {layout.fingerprint[:12]!r}: "
            "the silo's task builds another model than the one that was submitted; "
            "install the same version of the task"
        )
    return update.flaw or runner.collection.problem(client, update, runner.encoding_of(client))
