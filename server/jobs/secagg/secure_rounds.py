"""Secure aggregation at the coordinator: drives one attempt after the other through its protocol.

Keys and shares are exchanged while silos train; what they then upload is masked. When the engine has
the round's updates, exactly those are added up, their silos agree on that set and give out the shares
that unmask the sum. Every message that counts is in the attempt's journal before anything follows
from it, so that a coordinator that is started again goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, PrivacyError, ProtocolError, RoundtableError, SiteFailure
from roundtable.core.layout import Layout
from roundtable.engine import GroupMeans, Mean
from roundtable.engine import messages as m
from roundtable.engine.combining.region_sums import parts_of
from roundtable.privacy import subject_of, values_masked
from roundtable.privacy.secagg import ServerPhase
from roundtable.privacy.secagg.masks import MASKED
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.jobs.background import BackgroundTasks
from roundtable.server.jobs.job_inbox import JobInbox
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.round_collection import Pay
from roundtable.server.jobs.secagg.secure_attempt import KEYS, SecureAttempt
from roundtable.server.storage.finite_check import AnyContent

log = logging.getLogger("roundtable.server.jobs.secagg.secure_rounds")

SHARE_OF_DEADLINE = 0.1
"""Of the round's deadline: what an exchange of small messages may take. Unmasking may take all of it,
because once silos have been asked for shares the round makes its model in this attempt or not at all."""
NO_IDENTITY = "it has no signing identity, which secure aggregation needs: issue its credentials anew"


class SecureRounds:
    """The secure aggregation of one job."""

    def __init__(
        self,
        job_id: str,
        job: JobConfig,
        config: str,
        sent: Layout,
        services: JobServices,
        inbox: JobInbox,
        tasks: BackgroundTasks,
    ) -> None:
        self._id = job_id
        self._job = job
        self._config = config
        self._sent = sent
        self._services = services
        self._inbox = inbox
        self._tasks = tasks
        self._folder = services.artifacts.folder / "secure"
        self._key = (0, 0)
        self._attempt: SecureAttempt | None = None
        self._changed = asyncio.Event()
        self._busy = False
        self._permitted = False
        self._exchange: asyncio.Task[None] | None = None

    def take_up(self, step: m.Step) -> None:
        """After a restart: goes on with the attempt that was under way, if it had begun.

        With a bucket that may have been on another machine, which has the journal: a fresh one follows.
        """
        if self._path(step).exists():
            self._open(step)
        elif self._services.artifacts.bucket is not None and step.phase == m.TRAIN:
            self._key = (step.round, step.attempt)
            lost = AggregationError("what the attempt has heard is not on this machine")
            self._tasks.spawn(self._give_up(step, lost))

    def admit(self, action: m.Instruct) -> Sequence[bytes] | None:
        """The certificates of all who take part; None where the silo cannot.

        Who trains for a group that is still to be found takes part in nothing yet.
        """
        if action.step.phase == m.PREPARE:
            return self._admit_to_prepare(action)
        if action.step.phase != m.TRAIN:
            return ()
        if (action.step.round, action.step.attempt) != self._key:
            self._open(action.step, action.cohort, action.model)
        attempt = self._attempt
        if attempt is None or action.client not in attempt.identities:
            return None
        return [attempt.identities[name].certificate for name in sorted(attempt.identities)]

    def exchanged(self, client: str, step: m.Step, message: bytes) -> None:
        """Takes a silo's message of the protocol."""
        attempt = self._current(step)
        if attempt is None or self._busy:
            return
        try:
            attempt.receive(message)
            if client in attempt.server.aborted:
                self._fail(step, client, "protocol_violation", attempt.server.aborted[client])
        except ProtocolError as error:
            log.warning("%s: %s", client, error, extra={"job": self._id, "site": client})
            if attempt.began_anew(client, message):
                reason = "the silo was restarted and has lost its keys of this attempt"
                attempt.lose(client, reason)
                self._fail(step, client, "node_failure", reason)
        self._changed.set()
        self._inbox.notify()

    def failed(self, failure: SiteFailure) -> None:
        """Goes on without a silo that has said that it will not answer."""
        step = m.Step(failure.round, failure.attempt, failure.phase)
        attempt = self._current(step)
        if attempt is None or self._busy or step.phase not in (m.TRAIN, to_agents.SECURE):
            return
        attempt.lose(failure.site, failure.detail)
        if step.phase == to_agents.SECURE:
            self._fail(step, failure.site, failure.kind, failure.detail)
        self._changed.set()

    def rejoined(self, client: str) -> None:
        """Sends again what may have been lost with the silo's connection."""
        if self._attempt is not None and client in self._attempt.outgoing:
            self._send(self._attempt, client)

    def problem(self, client: str, offer: UploadOffer, encoding: str) -> str:
        """What is wrong with the offer of a masked vector, in words; empty if nothing is."""
        attempt = self._current(offer.at.step)
        if attempt is None:
            return "the attempt's secure aggregation is not known here"
        if offer.encoding != MASKED:
            return f"the update is encoded as {offer.encoding!r}, and this job takes masked ones only"
        if offer.examples or offer.metrics:
            return "example counts and metrics travel inside a masked update, not beside it"
        if offer.size != attempt.round.upload_bytes:
            return f"the masked update has {offer.size} bytes, not {attempt.round.upload_bytes}"
        try:
            return attempt.problem(client, offer.digest, offer.announcement)
        except ProtocolError as error:
            return str(error)

    def content_check(self, client: str, offer: UploadOffer) -> AnyContent:
        """A check that accepts everything: masked values are uniform."""
        return AnyContent()

    def sum_content(self, step: m.Step) -> tuple[int, AnyContent]:
        """A sum in the ring has the size of one masked vector, and is as uniform."""
        attempt = self._current(step)
        return (attempt.round.upload_bytes if attempt is not None else 0), AnyContent()

    def arrived(self, client: str, offer: UploadOffer, norm: float | None) -> None:
        """Keeps the signed announcement of a masked vector that is here, whole."""
        attempt = self._current(offer.at.step)
        if attempt is not None:
            attempt.announce(client, offer.announcement)

    def progress(self) -> str:
        """Where the protocol is, in words; empty while the silos just train."""
        if self._attempt is None or (self._attempt.phase is ServerPhase.MASKED and not self._busy):
            return ""
        return f"secure aggregation, {self._attempt.progress()}"

    def permit(self, step: m.Step) -> None:
        """Lets silos be asked to unmask: that no other attempt at the round will be unmasked is durable."""
        self._permitted = (step.round, step.attempt) == self._key

    async def collect(self, action: m.Aggregate, pay: Pay) -> Mean | GroupMeans:
        """The mean of exactly the updates that the engine names, or the means of their groups.

        `pay` makes it durable that the attempt is paid for and the round used up, and has `permit` called,
        before anybody is asked for a share that unmasks. Raises AggregationError where too few silos are
        left; nothing was revealed but at most the sum.
        """
        if (action.step.round, action.step.attempt) != self._key:
            self._open(action.step)
        attempt = self._attempt
        if attempt is None:
            raise AggregationError(
                "secure aggregation: the coordinator restarted in this attempt, and what it had heard "
                "is lost; the next attempt uses new keys"
            )
        if self._exchange is not None:
            await self._exchange
        try:
            if attempt.phase is ServerPhase.MASKED:
                await self._blocking(self._fold, attempt, action.updates)
                await self._advance(attempt)
            while attempt.phase is not ServerPhase.DONE:
                share = SHARE_OF_DEADLINE
                if attempt.irrevocable:
                    await pay()
                    share = 1.0
                self._expect(attempt)
                self._tell(attempt)
                await self._hear(attempt, share * self._job.cohort.deadline)
                self._expect(attempt)
                await self._advance(attempt)
            delivered = {update.client for update in action.updates}
            mean: Mean | GroupMeans = await self._blocking(attempt.decode, delivered)
        except (ProtocolError, PrivacyError) as error:
            raise AggregationError(f"secure aggregation: {error}{_reasons(attempt)}") from error
        return mean.of_age(action.updates[0].staleness(action.step.round)) if isinstance(mean, Mean) else mean

    def retire(self, round: int) -> None:
        """Forgets the attempt of a round that is committed."""
        if self._key[0] <= round:
            self.close(forget=True)

    def close(self, *, forget: bool) -> None:
        """Stops the attempt that runs; with `forget` for good."""
        if self._exchange is not None:
            self._exchange.cancel()
        if self._attempt is not None:
            self._attempt.close(forget=forget)
        self._attempt = None
        self._exchange = None
        self._key = (0, 0)
        self._permitted = False
        self._changed.set()

    def _fold(self, attempt: SecureAttempt, updates: Sequence[m.Update]) -> None:
        """Adds up the masked vectors of exactly these silos, and what relays have made of theirs. Blocks."""
        load = self._services.artifacts.load
        for part in parts_of(updates):
            if part[0].relay:
                attempt.fold_sum([each.client for each in part], part[0].digest, load)
            else:
                attempt.fold({part[0].client: part[0].digest}, load)

    def _expect(self, attempt: SecureAttempt) -> None:
        """Raises AggregationError if the attempt was given up meanwhile: nobody may be asked then."""
        unasked = attempt.irrevocable and not self._permitted
        if self._attempt is not attempt or unasked:
            raise AggregationError("secure aggregation: the attempt was given up before its sum was unmasked")

    def _current(self, step: m.Step) -> SecureAttempt | None:
        return self._attempt if (step.round, step.attempt) == self._key else None

    def _open(self, step: m.Step, cohort: tuple[str, ...] = (), model: str = "") -> None:
        """Begins an attempt, or takes it up from its journal."""
        self.close(forget=True)
        self._key = (step.round, step.attempt)
        path = self._path(step)
        identities_shown = self._services.sessions.identities
        for name in [name for name in cohort if name not in identities_shown]:
            self._fail(step, name, "refused", NO_IDENTITY)
        columns = values_masked(self._job, self._sent, step.round)
        try:
            if path.exists():
                self._attempt = SecureAttempt.resume(
                    self._id, self._job, columns, step, path, self._services.artifacts.load
                )
            elif cohort:
                identities = {name: identities_shown[name] for name in cohort if name in identities_shown}
                subject = subject_of(self._config, model)
                self._attempt = SecureAttempt.begin(
                    self._id, self._job, columns, step, path, identities, subject
                )
        except RoundtableError as error:
            path.unlink(missing_ok=True)
            self._tasks.spawn(self._give_up(step, error))
        self._forget_others(path)
        if self._attempt is None:
            return
        parameters = self._attempt.round.parameters.summary()
        log.info("round %d, attempt %d: %s", step.round, step.attempt, parameters, extra={"job": self._id})
        if self._attempt.phase in (*KEYS, ServerPhase.MASKED):
            self._exchange = asyncio.get_running_loop().create_task(self._exchange_keys(self._attempt, step))

    def _path(self, step: m.Step) -> Path:
        return self._folder / f"{self._id}.{step.round}.{step.attempt}"

    def _forget_others(self, path: Path) -> None:
        for other in self._folder.glob(f"{self._id}.*"):
            if other != path:
                other.unlink(missing_ok=True)

    async def _exchange_keys(self, attempt: SecureAttempt, step: m.Step) -> None:
        """Exchanges keys and shares; afterwards each silo can mask what it has trained."""
        try:
            self._tell(attempt)
            while attempt.phase in KEYS:
                await self._hear(attempt, SHARE_OF_DEADLINE * self._job.cohort.deadline)
                for client, said in (await self._advance(attempt)).items():
                    self._fail(step, client, "slow_node", said)
                self._tell(attempt)
        except RoundtableError as error:
            await self._give_up(step, error)

    async def _give_up(self, step: m.Step, error: RoundtableError) -> None:
        train = m.Step(step.round, step.attempt, m.TRAIN)
        reasons = _reasons(self._attempt) if self._attempt is not None else ""
        await self._inbox.tell(m.AggregationFailed(train, f"secure aggregation: {error}{reasons}"))

    async def _hear(self, attempt: SecureAttempt, seconds: float) -> None:
        """Waits until every silo has answered or the attempt is given up, at most for so many seconds."""
        end = asyncio.get_running_loop().time() + seconds
        while self._attempt is attempt and not attempt.server.ready:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _advance(self, attempt: SecureAttempt) -> dict[str, str]:
        """Closes the phase, durably; returns the silos that it drops, with reasons."""
        heavy = attempt.phase in (ServerPhase.MASKED, ServerPhase.UNMASK)
        out: dict[str, str] = await self._blocking(attempt.advance) if heavy else attempt.advance()
        await asyncio.to_thread(attempt.journal.sync)
        return out

    async def _blocking(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs work in the compute thread. No answer is awaited meanwhile, so messages are dropped."""
        self._busy = True
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._services.compute, work, *arguments)
        finally:
            self._busy = False

    def _tell(self, attempt: SecureAttempt) -> None:
        for client in attempt.outgoing:
            self._send(attempt, client)
        self._inbox.notify()

    def _send(self, attempt: SecureAttempt, client: str) -> None:
        if attempt.irrevocable and not self._permitted:
            return  # What is asked for now unmasks the sum: it is paid for first.
        session = attempt.server.session
        message = to_agents.exchange(self._id, session.round, session.attempt, attempt.outgoing[client])
        self._services.sessions.send(client, message)

    def _admit_to_prepare(self, action: m.Instruct) -> Sequence[bytes] | None:
        """Nothing, where the silo can mask later what it trains now. An attempt before this one is over."""
        if self._key < (action.step.round, action.step.attempt):
            self.close(forget=True)
        if action.client in self._services.sessions.identities:
            return ()
        self._fail(action.step, action.client, "refused", NO_IDENTITY, m.PREPARE)
        return None

    def _fail(self, step: m.Step, client: str, kind: str, detail: str, phase: str = m.TRAIN) -> None:
        """Drops a silo from the attempt: tells the engine and the silo."""
        at = m.Step(step.round, step.attempt, phase)
        failure = SiteFailure(client, step.round, step.attempt, m.TRAIN, kind, detail)
        self._tasks.spawn(self._inbox.tell(m.ClientFailed(at, failure)))
        self._services.sessions.send(client, to_agents.withdrawal(self._id, m.Withdraw(client, at, detail)))


def _reasons(attempt: SecureAttempt) -> str:
    """The reasons of silos that gave up, for an error message."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(attempt.server.aborted.items()))
    return f" ({reasons})" if reasons else ""
