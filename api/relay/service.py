"""What the relay answers its silos: the service of agents, in the coordinator's words where it has them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from typing_extensions import override

from roundtable.client.door.incoming import upload_state_of
from roundtable.client.door.model_names import ArtifactName
from roundtable.core.bounds import is_digest
from roundtable.core.errors import ProtocolError
from roundtable.core.identity.signing import PATH_MARK
from roundtable.proto import agent_pb2, agent_pb2_grpc, common_pb2, relay_pb2
from roundtable.proto.pieces import Piece
from roundtable.relay.cache import RegionCache
from roundtable.relay.forwarding import Forwarding, for_silo
from roundtable.relay.held_updates import MOST_HELD, RelaySpool, key_of
from roundtable.relay.regional import RegionalRounds
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Silo, Silos, asked_of, fits
from roundtable.relay.sum_orders import SumTerms
from roundtable.relay.trunk import Trunk
from roundtable.server.auth.access import LINES_A_SECOND, LINES_AT_ONCE, Context, Refusal, caller, principal
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.auth.relayed import RelayedSilos
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.door.from_agents import offer_of
from roundtable.server.door.from_operators import download_of
from roundtable.server.door.from_relays import Bearer
from roundtable.server.services import transfer
from roundtable.server.services.lines import Line
from roundtable.server.services.upload_receipts import Outcome, Receipts
from roundtable.server.services.uploads import Part
from roundtable.server.storage.artifact_store import DamagedArtifact

log = logging.getLogger("roundtable.relay")

HELLO_SECONDS = 30.0
MESSAGES_A_SECOND, MESSAGES_AT_ONCE = 200.0, 5000.0
Answer = TypeVar("Answer")
HELD = agent_pb2.UploadReceipt.HELD


class RelayAgentService(agent_pb2_grpc.AgentsServicer):
    """`roundtable.v1.Agents` at a relay. The caller's name is its certificate's."""

    def __init__(
        self,
        silos: Silos,
        relayed: RelayedSilos,
        trunk: Trunk,
        cache: RegionCache,
        spool: RelaySpool,
        forwarding: Forwarding,
        receipts: Receipts,
        threads: ThreadPoolExecutor,
        heartbeat: float,
        patience: float,
        sums: RelaySums,
        regional: RegionalRounds,
    ) -> None:
        self._sums = sums
        self._regional = regional
        self._silos = silos
        self._relayed = relayed
        self._borne: dict[str, relay_pb2.Bearer] = {}
        self._trunk = trunk
        self._cache = cache
        self._spool = spool
        self._forwarding = forwarding
        self._receipts = receipts
        self._threads = threads
        self._heartbeat = heartbeat
        self._patience = patience
        self._messages = RateLimit(MESSAGES_A_SECOND, MESSAGES_AT_ONCE, time.monotonic)
        self._lines = RateLimit(LINES_A_SECOND, LINES_AT_ONCE, time.monotonic)

    @override
    async def Connect(self, requests: AsyncIterator[agent_pb2.FromAgent], context: Context) -> None:  # type: ignore[override]
        messages = aiter(requests)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            hello = agent_pb2.FromAgent()
        if hello.WhichOneof("message") != "hello" or not fits(hello):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a control stream begins with a hello")
        if not self._trunk.stands:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "this relay has no connection to its coordinator now; come again"
            )
        await self._serve(Silo(caller(context), hello), messages, context.write, 3 * self._heartbeat + 1)

    async def serve(self, line: Line) -> None:
        """Serves a silo of a relay behind this one, until its stream ends. Without a coordinator it waits."""
        hello = await anext(line.requests)
        # It is that relay that is silent or not: its beats are for all of its silos.
        await self._serve(Silo(line.name, hello), line.requests, line.write, None)

    def hear(self, silos: Iterable[str]) -> None:
        """A relay behind this one is alive, as its own stream shows."""

    def bear(self, bearer: Bearer, key: bytes) -> None:
        """A silo that is away, whose updates a relay behind this one holds: shown to the coordinator."""
        passage = agent_pb2.Passage(
            relay=PATH_MARK.join(bearer.passage.path), signature=bearer.passage.signature
        )
        shown = relay_pb2.Bearer(
            silo=bearer.silo,
            identity=bearer.identity,
            installation=bearer.installation,
            passage=passage,
        )
        self._borne[bearer.silo] = shown
        self._trunk.send(relay_pb2.FromRelay(bearer=shown))

    def bearers(self, silos: Iterable[str]) -> list[relay_pb2.Bearer]:
        """Who signs the updates of these silos, of those that are known here."""
        here = {name: silo.bearer() for name in silos if (silo := self._silos.get(name)) is not None}
        return list({**{name: self._borne[name] for name in silos if name in self._borne}, **here}.values())

    @property
    def coordinator(self) -> str:
        """The database's identity, as the coordinator has said last."""
        return self._trunk.coordinator

    @property
    def heartbeat(self) -> float:
        """Seconds."""
        return self._heartbeat

    def clock(self) -> float:
        """Unix time."""
        return time.time()

    @override
    async def Download(self, request: common_pb2.DownloadRequest, context: Context) -> None:  # type: ignore[override]
        name, wish = caller(context), download_of(request)
        model = self._model(wish.digest) if is_digest(wish.digest) else None
        if model is None:
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"no instruction in force for {name} names the artifact {wish.digest[:12]!r}",
            )
        path = await self._cache.obtain(model)
        try:
            await transfer.send(context, path, wish.digest, wish.offset, self._threads)
        except DamagedArtifact as error:
            self._cache.drop(path)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{error}; ask for it from the start") from error

    @override
    async def UploadStatus(self, request: agent_pb2.UploadHeader, context: Context) -> agent_pb2.UploadState:
        name, offer = caller(context), offer_of(request)
        if (given := self._regional.receipt(name, offer)) is not None:
            return agent_pb2.UploadState(receipt=given)
        if self._holds(name, offer):
            return agent_pb2.UploadState(receipt=await self._outcome(name, offer))
        if self._most(name, offer) is None or not offer.layout:
            state = await self.ask(name, request)
            if not state.wanted or not offer.layout:
                return state
        summed = self._terms(self._silos.get(name), offer) is not None
        return agent_pb2.UploadState(offset=self._spool.received(name, offer), wanted=True, summed=summed)

    @override
    async def Upload(  # type: ignore[override]
        self, requests: AsyncIterator[Part], context: Context
    ) -> agent_pb2.UploadReceipt:
        name, parts = caller(context), aiter(requests)
        header = await anext(parts, None)
        if not isinstance(header, agent_pb2.UploadHeader):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "an upload begins with its header")
        offer = offer_of(header)
        if offer.flaw:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, offer.flaw)
        decided = self._regional.receipt(name, offer)
        if decided is None and not self._holds(name, offer):
            decided = await self._take(name, header, offer, parts)
        return decided or await self._outcome(name, offer)

    @override
    async def Renew(self, request: agent_pb2.RenewRequest, context: Context) -> common_pb2.Certificates:
        name = caller(context)
        return await self._passed_on(lambda stub: stub.Renew(request, metadata=for_silo(name), timeout=30.0))

    async def _serve(
        self,
        silo: Silo,
        messages: AsyncIterator[agent_pb2.FromAgent],
        write: Callable[[agent_pb2.ToAgent], Awaitable[object]],
        patience: float | None,
    ) -> None:
        self._silos.open(silo)
        self._borne.pop(silo.name, None)
        self._say(silo, silo.hello())
        listening = asyncio.create_task(self._listen(silo, messages, patience))
        try:
            while (message := await silo.outbox.get()) is not None:
                await write(message)
        finally:
            listening.cancel()
            if self._silos.close(silo):
                self._sums.left()
                self._trunk.send(relay_pb2.FromRelay(left=silo.name))

    def _model(self, digest: str) -> ArtifactName | None:
        """The model of this digest, if the caller or a silo that it speaks for was asked to work with it."""
        for name in self._relayed.silos_of(principal()):
            silo = self._silos.get(name)
            if silo is not None and (model := silo.model(digest)) is not None:
                return model
        return None

    def _say(self, silo: Silo, message: agent_pb2.FromAgent) -> None:
        said = relay_pb2.SaidBySilo(silo=silo.name, message=message)
        self._trunk.send(relay_pb2.FromRelay(said=said))

    async def _listen(
        self, silo: Silo, messages: AsyncIterator[agent_pb2.FromAgent], patience: float | None
    ) -> None:
        """Hands on what the silo says until its stream ends, or it is silent for `patience` seconds."""
        try:
            while True:
                async with asyncio.timeout(patience):
                    message = await anext(messages)
                if not self._messages.allows(silo.name) or not fits(message):
                    silo.end("too many or too large messages")
                    return
                self._heard(silo, message)
        except (StopAsyncIteration, grpc.aio.UsageError):
            log.debug("the stream of %s is gone", silo.name)
        except TimeoutError:
            log.warning("%s has been silent too long", silo.name, extra={"site": silo.name})
        finally:
            silo.end()

    def _heard(self, silo: Silo, message: agent_pb2.FromAgent) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            silo.send(to_agents.heartbeat())
            if message.heartbeat.state == silo.state:
                return
            silo.state = message.heartbeat.state
        elif kind == "failure":
            self._sums.excused(silo.name, asked_of(message.failure.step))
        elif kind == "maintenance":
            silo.maintained(message.maintenance)
        elif kind == "hello":
            silo.end("a second hello")
            return
        if (said := self._regional.upwards(silo.name, message)) is not None:
            self._say(silo, said)

    def _holds(self, name: str, offer: UploadOffer) -> bool:
        held = self._forwarding.held(key_of(name, offer))
        return held is not None and held.offer.digest == offer.digest

    def _most(self, name: str, offer: UploadOffer) -> int | None:
        silo = self._silos.get(name)
        return None if silo is None else silo.most_bytes(key_of(name, offer)[1:])

    def _terms(self, silo: Silo | None, offer: UploadOffer) -> SumTerms | None:
        """How the update is to be added up here; None where it is handed on."""
        order = silo.sum_order(key_of(silo.name, offer)[1:]) if silo is not None else None
        return order.terms if order is not None else None

    async def _take(
        self, name: str, header: agent_pb2.UploadHeader, offer: UploadOffer, parts: AsyncIterator[Part]
    ) -> agent_pb2.UploadReceipt | None:
        """Takes an update's bytes and keeps them; the receipt instead where they are not wanted."""
        most = self._most(name, offer)
        if most is None:
            state = await self.ask(name, header)
            if not state.wanted:
                return state.receipt
            most = offer.size
        else:
            state = agent_pb2.UploadState()
        silo = self._silos.get(name)
        bearer = silo.bearer() if silo is not None else self._borne.get(name)
        if bearer is None:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "an update comes without a control stream: connect first"
            )
        if offer.size > most or self._forwarding.of_silo(name) >= MOST_HELD:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"an update of {offer.size} bytes is more than its model allows ({most}), or "
                f"{MOST_HELD} updates of this silo are held here already",
            )
        terms = self._terms(silo, offer)
        if state.summed and terms is None:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE,
                "the job's updates are added up here, and the order for this one is not here yet; come again",
            )
        if forged := self._regional.forged(name, offer, bearer.identity, terms):
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, forged)
        writer = self._spool.writer(name, offer)
        try:
            await transfer.in_thread(self._threads, writer.open)
            await transfer.receive(_pieces(parts), writer, offer.size, self._threads)
            if writer.offset != offer.size:
                raise Refusal(
                    grpc.StatusCode.ABORTED,
                    f"the upload ended at byte {writer.offset} of {offer.size}; go on from there",
                )
            await transfer.in_thread(self._threads, writer.finish)
        finally:
            writer.close()
        held = await transfer.in_thread(self._threads, self._spool.keep, name, header, bearer, terms)
        self._forwarding.start(held, fresh=True)
        return None

    async def _outcome(self, name: str, offer: UploadOffer) -> agent_pb2.UploadReceipt:
        """The coordinator's receipt if it comes soon, else the relay's own, that it hands the update on."""
        patience = self._patience if self._trunk.stands else 0.0
        receipt = await self._forwarding.receipt(key_of(name, offer), patience)
        return receipt or self._receipts.give(name, offer, Outcome(HELD, "the relay has it and hands it on"))

    async def ask(self, name: str, header: agent_pb2.UploadHeader) -> agent_pb2.UploadState:
        """What the coordinator says of an update that the relay does not know of."""
        state: agent_pb2.UploadState = await self._passed_on(
            lambda stub: stub.UploadStatus(header, metadata=for_silo(name))
        )
        try:
            upload_state_of(state, header.content.size)
        except ProtocolError as error:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        return state

    async def _passed_on(self, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """The coordinator's answer to a silo's call, or its refusal. Any of them fails while it is away."""
        if not self._trunk.stands:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "this relay has no connection to its coordinator now")
        stub = await self._trunk.link.stub()
        try:
            return await call(stub)
        except grpc.aio.AioRpcError as error:
            raise Refusal(error.code(), str(error.details())) from error
        except grpc.aio.UsageError as error:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the coordinator's connection has ended") from error


async def _pieces(parts: AsyncIterator[Part]) -> AsyncIterator[Piece]:
    async for part in parts:
        if not isinstance(part, Piece):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "after an upload's header only chunks follow")
        yield part
