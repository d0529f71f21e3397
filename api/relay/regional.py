"""Rounds within the region: the relay gives its silos the rounds that lead to the one that the coordinator
asks for, and decides about their updates itself (Liu et al. 2020, algorithm 1).

The coordinator's order of a round that goes up becomes, for each silo, orders of the rounds before it. Their
updates are collected and added up as any step's are (`relay_sums.py`); the sum is then taken here, in the
coordinator's place: the region's model moves by it, its silos get the relay's receipts, and the next order.
The round that goes up is the coordinator's again: its sum is relative to the model that that one knows.
What the silos say of a round here is said to the coordinator of the round that it has asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from roundtable.client.door.model_names import ArtifactName
from roundtable.core.errors import ConfigError, ResourceError, RoundtableError
from roundtable.core.failpoints import failpoint
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import PATH_MARK
from roundtable.proto import agent_pb2, common_pb2, relay_pb2
from roundtable.relay.cache import RegionCache
from roundtable.relay.held_updates import Part
from roundtable.relay.made_sums import FromRegion, MadeSum
from roundtable.relay.region_decisions import RegionDecisions
from roundtable.relay.region_orders import TRAIN, LiveSpan, next_order, objection
from roundtable.relay.region_spans import RegionSpan, RoundMade, SpanFolder
from roundtable.relay.regional_table import RegionalTable
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Asked, Silo, Silos, asked_in
from roundtable.relay.sum_orders import SumTerms, job_in
from roundtable.server.auth.access import Refusal
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.door.from_relays import MOST_MEMBERS
from roundtable.server.jobs.sessions import Identity
from roundtable.server.services import transfer
from roundtable.server.services.upload_receipts import Receipts, unsigned

log = logging.getLogger("roundtable.relay")

RETRY_SECONDS, LATE_SECONDS, ORDERS_SECONDS = 1.0, 1.0, 2.0
Receipt = agent_pb2.UploadReceipt


class RegionalRounds:
    """The rounds within this region, of all jobs. `instruct` tells a silo what to do, `say` the coordinator
    something of a silo; `policy` is that of relay.toml, None for none."""

    def __init__(
        self,
        policy: RegionalTable | None,
        folder: SpanFolder,
        name: str,
        identity: SiloIdentity,
        authority: bytes,
        cache: RegionCache,
        silos: Silos,
        sums: RelaySums,
        receipts: Receipts,
        threads: ThreadPoolExecutor,
        patience: float,
        say: Callable[[relay_pb2.FromRelay], None],
        instruct: Callable[[Silo, agent_pb2.Instruction], None],
    ) -> None:
        self._policy = policy
        self._folder = folder
        self._name = name
        self._identity = identity
        self._authority = authority
        self._cache = cache
        self._silos = silos
        self._sums = sums
        self._threads = threads
        self._patience = patience
        self._say = say
        self._instruct = instruct
        self._live: dict[str, LiveSpan] = {}
        self._decided = RegionDecisions(receipts)
        self._tasks: set[asyncio.Task[None]] = set()

    def recover(self) -> None:
        """Takes up the rounds that an earlier process has begun. Blocks."""
        for span in self._folder.recover():
            live = self._live[span.job] = LiveSpan(span)
            for made in span.rounds:
                self._decided.settle((span.job, made.round, span.attempt, TRAIN), made)
            last = span.rounds[-1].members if span.rounds else {}
            self._sums.go_on(live.asked, self._patience, span.seconds(time.time()), last)
            log.info("%s: round %d within the region goes on", span.job, span.round)

    async def close(self) -> None:
        """Ends all work; what is kept goes on after the next start."""
        for live in self._live.values():
            live.untime()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ordered(self, silo: Silo, order: agent_pb2.Instruction) -> agent_pb2.Instruction | None:
        """What a silo is told in the place of the coordinator's order; None for nothing, as yet."""
        if order.WhichOneof("work") != TRAIN:
            return order
        try:
            job = job_in(order.job_config)
        except ConfigError:
            return order  # The silo says so itself.
        way = silo.way.split(PATH_MARK)
        if job.regions.rounds == 1 or way[0] != self._name:
            return order
        if reason := objection(self._policy, job, order, way, self._authority):
            self._fail(silo.name, order.step, "refused", reason)
            return None
        first = job.regions.first(order.step.round)
        if first == order.step.round:
            self._drop(order.step.job)
            return order
        live = self._begun(order, first)
        if live.span.problem:
            self._fail(silo.name, order.step, "node_failure", live.span.problem)
            return None
        if silo.name not in live.orders and len(live.orders) >= MOST_MEMBERS:
            reason = f"a region has at most {MOST_MEMBERS} silos in a job with rounds within it"
            self._fail(silo.name, order.step, "refused", reason)
            return None
        live.span.ends = time.time() + order.deadline_seconds
        live.orders[silo.name] = order
        self._time(live)
        if self._sums.waits_for(silo.name, live.asked):
            return None  # Its update is here.
        return self._next(live, silo.name)

    def upwards(self, silo: str, message: agent_pb2.FromAgent) -> agent_pb2.FromAgent | None:
        """What a silo says, of the round that the coordinator has asked for; None for what is over here."""
        kind = message.WhichOneof("message")
        if kind not in ("accepted", "progress", "failure", "trouble"):
            return message
        step = getattr(message, kind).step
        live = self._live.get(step.job)
        span = live.span if live is not None else None
        if live is None or span is None or step.phase != TRAIN or step.attempt != span.attempt:
            return message
        if not span.first <= step.round < span.last:
            return message
        if step.round != span.round:
            return None
        if kind == "failure":
            # It is out until the coordinator asks it again.
            live.orders.pop(silo, None)
        said = agent_pb2.FromAgent()
        said.CopyFrom(message)
        getattr(said, kind).step.round = span.last
        return said

    def withdrawn(self, silo: str, withdraw: agent_pb2.Withdraw) -> agent_pb2.Withdraw:
        """What a silo is told in the place of the coordinator's word that a step, or a job, is over."""
        step = withdraw.step
        live = self._live.get(step.job)
        if live is None:
            return withdraw
        span = live.span
        if step.round == 0:
            self._drop(step.job)
        elif (step.round, step.attempt, step.phase) == (span.last, span.attempt, TRAIN):
            live.orders.pop(silo, None)
            told = agent_pb2.Withdraw()
            told.CopyFrom(withdraw)
            told.step.round = span.round
            return told
        return withdraw

    def receipt(self, silo: str, offer: UploadOffer) -> Receipt | None:
        """The receipt for an update about which was decided here. None for any other; Refusal for one that
        may be wanted here later."""
        asked = asked_in(offer)
        if asked in self._decided:
            return self._decided.receipt(silo, offer, asked)
        live = self._live.get(asked[0])
        if live is not None and live.asked == asked and asked[1] < live.span.last and silo not in live.orders:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "the order for this round within the region is not here yet"
            )
        return None

    def forged(self, silo: str, offer: UploadOffer, certificate: bytes, terms: SumTerms | None) -> str:
        """Why an update that is to be added up is not one that the silo has signed, by its certificate (PEM),
        for the model of its order: in a sum it would spoil all others; "" for any other."""
        live, model = self._live.get(offer.at.job), terms.model if terms is not None else ""
        if live is not None and live.asked == asked_in(offer):
            model = live.span.model.digest
        holder = Identity(certificate, b"") if certificate else None
        return unsigned(offer, holder, model, silo, self._authority) if model else ""

    def is_within(self, asked: Asked) -> bool:
        """Whether updates of this step stay here, taken or not."""
        live = self._live.get(asked[0])
        return asked in self._decided or (
            live is not None and live.asked == asked and asked[1] < live.span.last
        )

    def is_over(self, asked: Asked) -> bool:
        """Whether a round within the region is over, and its updates are decided about."""
        return asked in self._decided

    def refused(self, part: Part, problem: str) -> dict[str, Receipt]:
        """Receipts for updates that can be part of no sum; the coordinator is told why each is left out."""
        told = {}
        for silo, offer in part.members.items():
            told[silo] = self._decided.refused(silo, offer, problem)
            live = self._live.get(offer.at.job)
            if live is not None and (order := live.orders.get(silo)) is not None:
                detail = f"round {offer.at.step.round} within the region of the relay {self._name}: {problem}"
                trouble = agent_pb2.Trouble(
                    step=order.step,
                    kind="invalid_update",
                    detail=detail,
                    action="is left out of this round",
                )
                self._speak(silo, agent_pb2.FromAgent(trouble=trouble))
        return told

    async def part(self, asked: Asked) -> FromRegion | None:
        """What goes along with a sum of this step: the rounds that led to it, and for one that goes up by how
        much the region's model is away from the coordinator's. None for a step without such rounds."""
        live = self._live.get(asked[0])
        if live is None or live.asked != asked:
            return None
        if asked[1] < live.span.last:
            return FromRegion(tuple(live.span.within))
        await self._started(live)
        moved = await transfer.in_thread(self._threads, self._folder.moved, live.span)
        return FromRegion(tuple(live.span.within), moved)

    async def take(self, made: MadeSum) -> relay_pb2.SumReceipt | None:
        """Takes the sum of a round within the region, once, as the coordinator would; None for any other."""
        asked = asked_in(made.offer)
        if asked not in self._decided:
            live = self._live.get(asked[0])
            if live is None or live.asked != asked or asked[1] == live.span.last:
                return None
            await self._close(live, made)
        receipts = {
            silo: self._decided.receipt(silo, offer, asked) for silo, offer in made.offer.everyone.items()
        }
        return relay_pb2.SumReceipt(
            taken=all(each.status == Receipt.ACCEPTED for each in receipts.values()),
            members=[
                relay_pb2.MemberReceipt(silo=silo, receipt=receipt) for silo, receipt in receipts.items()
            ],
        )

    async def _close(self, live: LiveSpan, made: MadeSum) -> None:
        """Ends the round that runs with this sum, and begins the next one."""
        span, asked = live.span, live.asked
        least = self._policy.least_silos if self._policy is not None else 1
        if len(made.members) < least:
            self._give_up(
                live,
                f"{span.called(self._name)} has the updates of {len(made.members)} silos, and needs {least} "
                "([regional] least_silos)",
            )
            return
        closed = await self._made(live, made)
        if closed is None:
            self._decided.settle(asked, None)
            return
        failpoint("region_moved", closed.round, TRAIN)
        self._decided.settle(asked, closed)
        log.info(
            "%s: round %d within the region is done, of %d silos", span.job, closed.round, len(closed.members)
        )
        for silo in list(live.orders):
            if (connected := self._silos.get(silo)) is not None:
                self._instruct(connected, self._next(live, silo))
        self._time(live)

    async def _made(self, live: LiveSpan, made: MadeSum) -> RoundMade | None:
        """What the round that runs has made, durably; None where the region has given up, or the coordinator
        has gone on meanwhile."""
        span = live.span
        try:
            await self._started(live)
            closed: RoundMade = await self._durably(self._folder.make, span, made)
        except RoundtableError as error:
            self._give_up(live, f"{span.called(self._name)}: {error}")
            return None
        if self._live.get(span.job) is not live or span.problem:
            return None
        span.rounds.append(closed)
        await self._durably(self._folder.keep, span)
        self._folder.leave(span, closed.model)
        return closed

    async def _durably(self, work: Callable[..., Any], *arguments: object) -> Any:
        """Does what writes, again and again while the disk is full."""
        while True:
            try:
                return await transfer.in_thread(self._threads, work, *arguments)
            except ResourceError as error:
                log.error("%s; trying again", error)
                await asyncio.sleep(RETRY_SECONDS)

    def _next(self, live: LiveSpan, silo: str) -> agent_pb2.Instruction:
        """The order of the round that runs, for a silo that the coordinator has asked."""
        self._sums.expect(live.asked, self._patience)
        return next_order(live.span, live.orders[silo], silo, self._name, self._identity)

    def _begun(self, order: agent_pb2.Instruction, first: int) -> LiveSpan:
        step, model = order.step, order.train.model
        live = self._live.get(step.job)
        if live is not None and (live.span.last, live.span.attempt) == (step.round, step.attempt):
            return live
        self._drop(step.job)
        start = ArtifactName(model.digest, model.size)
        span = RegionSpan(
            step.job, first, step.round, step.attempt, start, time.time() + order.deadline_seconds
        )
        live = self._live[step.job] = LiveSpan(span)
        self._keep(span)
        self._sums.expect(live.asked, self._patience, min(self._patience, ORDERS_SECONDS))
        live.start = self._spawn(self._adopt(live))
        return live

    async def _started(self, live: LiveSpan) -> None:
        """Waits until the coordinator's model is here."""
        if live.start is None or (live.start.done() and live.start.exception() is not None):
            live.start = self._spawn(self._adopt(live))
        await asyncio.shield(live.start)

    async def _adopt(self, live: LiveSpan) -> None:
        if not self._folder.path(live.span.start.digest).exists():
            path = await self._cache.obtain(live.span.start)
            await transfer.in_thread(self._threads, self._folder.adopt, live.span, path)

    def _time(self, live: LiveSpan) -> None:
        """Gives up where nobody has delivered at the end of the time that a round within the region has."""
        span = live.span
        if live.timed == span.round or span.round == span.last:
            return
        live.untime()
        live.timed = span.round
        seconds = span.seconds(time.time()) + LATE_SECONDS
        live.close = asyncio.get_running_loop().call_later(seconds, self._nobody, live, span.round)

    def _nobody(self, live: LiveSpan, round: int) -> None:
        if live.span.round == round and not live.span.problem and not self._sums.works_on(live.asked):
            self._give_up(live, f"{live.span.called(self._name)}: no silo has delivered")

    def _give_up(self, live: LiveSpan, problem: str) -> None:
        """The region has no sum for the coordinator's round: each of its silos is said to have failed."""
        span = live.span
        log.warning("%s: %s", span.job, problem)
        self._decided.settle(live.asked, None)
        span.problem = problem
        self._keep(span)
        for silo, order in list(live.orders.items()):
            self._fail(silo, order.step, "node_failure", problem)
            if (connected := self._silos.get(silo)) is not None:
                over = common_pb2.Step()
                over.CopyFrom(order.step)
                over.round = span.round
                connected.send(agent_pb2.ToAgent(withdraw=agent_pb2.Withdraw(step=over, reason=problem)))
        live.orders.clear()

    def _keep(self, span: RegionSpan) -> None:
        """Writes the span down; where it cannot, the region has no round in this attempt."""
        try:
            self._folder.keep(span)
        except ResourceError as error:
            log.error("%s: %s", span.job, error)
            span.problem = span.problem or f"{span.called(self._name)} cannot be kept on the relay's disk"

    def _drop(self, job: str) -> None:
        """Forgets the job's span: the coordinator has gone on, or the job is over."""
        live = self._live.pop(job, None)
        if live is None:
            return
        live.untime()
        if live.span.round < live.span.last:
            self._decided.settle(live.asked, None)
        self._folder.forget(live.span)

    def _fail(self, silo: str, step: common_pb2.Step, kind: str, problem: str) -> None:
        """Says for a silo that it will not answer, and why."""
        failure = agent_pb2.Failure(step=step, kind=kind, detail=problem)
        self._speak(silo, agent_pb2.FromAgent(failure=failure))

    def _speak(self, silo: str, message: agent_pb2.FromAgent) -> None:
        self._say(relay_pb2.FromRelay(said=relay_pb2.SaidBySilo(silo=silo, message=message)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
