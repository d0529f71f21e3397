"""The relay-facing service: the control streams of a region's silos, all on one stream.

A coordinator serves it, and a relay for relays behind it.

Each silo's stream is served as if it had a connection of its own. What a relay says for a silo counts only
with the silo's own signatures: its passage, its installation's answer to a fresh number, its updates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import grpc
from typing_extensions import override

from roundtable.core.errors import IdentityError, RoundtableError
from roundtable.proto import (
    MAX_MESSAGE_BYTES,
    MOST_TOGETHER,
    PROTOCOL_VERSION,
    agent_pb2,
    relay_pb2,
    relay_pb2_grpc,
)
from roundtable.server.auth.access import Access, Context, Refusal, address_of, caller
from roundtable.server.auth.principals import CertifiedCallers, Principal
from roundtable.server.auth.relayed import RelayedSilos
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import Introduction
from roundtable.server.door.from_agents import message_of
from roundtable.server.door.from_relays import (
    Bearer,
    RelayIntroduction,
    bearer_of,
    relay_of,
    said_in,
    silo_of,
)
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.sessions import Identity
from roundtable.server.services.agents import AgentService
from roundtable.server.services.lines import Line, Outbox, shown_in

log = logging.getLogger("roundtable.server.services.relays")

HELLO_SECONDS = 30.0
MOST_SILOS = 20_000
ENVELOPE_BYTES = 1024
"""Of a message to a silo, on top of what an agent would be sent."""
WAITING_MESSAGES = 5000
AT_ONCE = 8
"""Messages of all trunks together that are heard before others have their turn. What a silo's arrival leads
to takes a millisecond or two of the event loop, and a command ten turns of the loop."""


class Above(Protocol):
    """Who serves the silos that a relay speaks for; `coordinator` is the database's identity."""

    @property
    def coordinator(self) -> str: ...

    @property
    def heartbeat(self) -> float: ...

    def clock(self) -> float: ...

    async def serve(self, line: Line) -> None:
        """Serves a silo's stream to its end."""

    def hear(self, silos: Iterable[str]) -> None:
        """These silos are alive."""

    def bear(self, bearer: Bearer, key: bytes) -> None:
        """A silo that is away, whose updates a relay holds; its Ed25519 key."""


class TakesSums(Protocol):
    """What becomes of relays' sums."""

    async def receive(self, relay: str, parts: AsyncIterator[relay_pb2.SumPart]) -> relay_pb2.SumReceipt:
        """Takes a whole sum; what was decided about it and its members."""


class AboveAll:
    """The coordinator: nobody is above it."""

    def __init__(self, agents: AgentService, services: JobServices) -> None:
        self.serve = agents.serve
        self.hear = services.sessions.hear
        self.clock = services.clock
        self.heartbeat = services.sessions.heartbeat
        self.coordinator = services.database.identity
        self._know = services.sessions.know_of

    def bear(self, bearer: Bearer, key: bytes) -> None:
        """Updates of this silo are checked by this key, until it shows one itself."""
        self._know(bearer.silo, Identity(bearer.identity, key))


class RelayService(relay_pb2_grpc.RelaysServicer):
    """`roundtable.v1.Relays`. The relay's name is its certificate's."""

    def __init__(
        self,
        above: Above,
        access: Access,
        relayed: RelayedSilos,
        principals: CertifiedCallers,
        version: str,
        sums: TakesSums,
    ) -> None:
        self._sums = sums
        self._above = above
        self._access = access
        self._relayed = relayed
        self._principals = principals
        self._version = version
        self._trunks: dict[str, _Trunk] = {}
        self._hearing = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    @override
    async def Trunk(self, requests: AsyncIterator[relay_pb2.FromRelay], context: Context) -> None:  # type: ignore[override]
        name, messages = caller(context), aiter(requests)
        hello = await self._hello(messages)
        if problem := self._other_protocol(hello):
            log.warning("the relay %s is refused: %s", name, problem)
            await context.write(relay_pb2.ToRelay(refused=problem))
            return
        if (older := self._trunks.get(name)) is not None:
            log.warning("the relay %s connected again; its older connection ends", name)
            older.end(f"another connection as {name!r} has taken the place of this one")
            await older.ended.wait()
        address = address_of(context)
        shown = context.auth_context()
        pem = b"".join([*shown["x509_pem_cert"], *shown.get("x509_pem_cert_chain", ())])
        trunk = _Trunk(
            name, pem, address, self._above, self._access, self._relayed, self._principals, self._hearing
        )
        self._trunks[name] = trunk
        most = min(max(1, hello.together), MOST_TOGETHER)
        await context.write(relay_pb2.ToRelay(welcome=self._welcome()))
        log.info("the relay %s is here", name)
        listening = asyncio.get_running_loop().create_task(trunk.listen(messages))
        try:
            while said := await trunk.outbox.take(most):
                await context.write(_in_one(said))
        finally:
            listening.cancel()
            # In a task of its own: gRPC may cancel this call, and who connects again waits for the end.
            closing = asyncio.get_running_loop().create_task(self._close(trunk, name))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    @override
    async def Sum(self, requests: AsyncIterator[relay_pb2.SumPart], context: Context) -> relay_pb2.SumReceipt:
        return await self._sums.receive(caller(context), aiter(requests))

    def end_all(self) -> None:
        """Ends every stream: the coordinator stops."""
        for trunk in self._trunks.values():
            trunk.end()

    async def _close(self, trunk: _Trunk, name: str) -> None:
        await trunk.close()
        if self._trunks.get(name) is trunk:
            del self._trunks[name]
        log.info("the relay %s is gone", name)

    async def _hello(self, messages: AsyncIterator[relay_pb2.FromRelay]) -> RelayIntroduction:
        """Reads the relay's introduction; Refusal for anything else."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = relay_of(await anext(messages))
        except (TimeoutError, StopAsyncIteration):
            hello = None
        if hello is None:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a relay's stream begins with a hello")
        return hello

    def _other_protocol(self, hello: RelayIntroduction) -> str:
        """Why the relay is refused, or ""."""
        if hello.protocol == PROTOCOL_VERSION:
            return ""
        return (
            f"the relay {hello.version or 'of an unknown version'} speaks protocol {hello.protocol}, "
            f"this coordinator {self._version} speaks protocol {PROTOCOL_VERSION}: install the same version "
            "on both"
        )

    def _welcome(self) -> relay_pb2.RelayWelcome:
        return relay_pb2.RelayWelcome(
            version=self._version,
            coordinator=self._above.coordinator,
            heartbeat_seconds=self._above.heartbeat,
            clock=self._above.clock(),
            revocations=self._principals.list_for_agents,
            together=MOST_TOGETHER,
        )


class _Trunk:
    """One relay's stream, and the streams of its silos."""

    def __init__(
        self,
        relay: str,
        certificate: bytes,
        address: str,
        above: Above,
        access: Access,
        relayed: RelayedSilos,
        principals: CertifiedCallers,
        hearing: asyncio.Lock,
    ) -> None:
        self._hearing = hearing
        self._relay = relay
        self._certificate = certificate
        self._address = f"{address} by the relay {relay}"
        self._above = above
        self._access = access
        self._relayed = relayed
        self._principals = principals
        self._revocations = principals.list_for_agents
        self._streams: dict[str, _SiloStream] = {}
        self.outbox: Outbox[relay_pb2.ToRelay] = Outbox()
        self.ended = asyncio.Event()

    async def listen(self, messages: AsyncIterator[relay_pb2.FromRelay]) -> None:
        """Hands on what the relay says until its stream ends, or it is silent for three heartbeats."""
        try:
            while True:
                async with asyncio.timeout(3 * self._above.heartbeat + 1):
                    message = await anext(messages)
                said = said_in(message)
                for first in range(0, len(said), AT_ONCE):
                    async with self._hearing:
                        for each in said[first : first + AT_ONCE]:
                            self._hear(each)
                        await asyncio.sleep(0)
        except TimeoutError:
            log.warning("the relay %s has been silent too long", self._relay)
        except (StopAsyncIteration, grpc.aio.UsageError):
            log.debug("the stream of the relay %s is gone", self._relay)
        except RoundtableError as error:
            self.end(str(error))
        finally:
            self.end()

    def end(self, reason: str = "") -> None:
        """Ends the stream; with a reason the relay is told not to come back by itself."""
        if reason:
            self.outbox.put(relay_pb2.ToRelay(refused=reason))
        self.outbox.put(None)

    async def close(self) -> None:
        """Ends the streams of all silos."""
        streams = [stream.task for stream in self._streams.values()]
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        self._relayed.leave(self._relay)
        self.ended.set()

    def _hear(self, message: relay_pb2.FromRelay) -> None:
        match message.WhichOneof("message"):
            case "said":
                self._said(silo_of(message.said.silo), message.said.message)
            case "left":
                if (stream := self._streams.get(silo_of(message.left))) is not None:
                    stream.heard.put_nowait(None)
            case "beat":
                # A list that has come since may hold it; listen ends the stream with what is wrong.
                self._principals.of_certificate(self._certificate)
                self._above.hear(self._streams)
                self.outbox.put(relay_pb2.ToRelay(beat=relay_pb2.RelayBeat()))
                if (newest := self._principals.list_for_agents) != self._revocations:
                    self._revocations = newest
                    self.outbox.put(relay_pb2.ToRelay(revocations=newest))
            case "bearer":
                self._bears(bearer_of(message.bearer))
            case kind:
                log.warning("the relay %s says what is not known here: %s", self._relay, kind)

    def _said(self, silo: str, message: agent_pb2.FromAgent) -> None:
        stream = self._streams.get(silo)
        if message.WhichOneof("message") == "hello":
            self._open(silo, message, stream)
        elif stream is None:
            self._tell_ended(silo)
        elif stream.heard.qsize() < WAITING_MESSAGES:
            stream.heard.put_nowait(message)
        else:
            self._refuse(silo, "too many messages in a short time")
            stream.task.cancel()

    def _open(self, silo: str, hello: agent_pb2.FromAgent, older: _SiloStream | None) -> None:
        """Begins a silo's stream in the place of an older one; one that proves nothing is refused."""
        said = message_of(hello)
        if not isinstance(said, Introduction):
            return self._refuse(silo, f"its hello is refused: {getattr(said, 'reason', 'it is none')}")
        if older is None and len(self._streams) >= MOST_SILOS:
            return self._refuse(
                silo, f"the relay {self._relay} has {MOST_SILOS} silos, the most of one relay"
            )
        try:
            who, _ = self._relayed.admit(self._relay, silo, said.identity, said.installation, said.passage)
            shown = shown_in(said.identity)
        except IdentityError as error:
            return self._refuse(silo, str(error))
        stream = _SiloStream()
        stream.heard.put_nowait(hello)
        line = Line(
            silo,
            shown,
            self._address,
            stream.messages(),
            lambda message: self._write(silo, message),
            self._relay,
        )
        previous = older.task if older is not None else None
        task = asyncio.get_running_loop().create_task(self._serve(stream, line, who, previous))
        stream.task = task
        self._streams[silo] = stream
        return None

    async def _serve(
        self, stream: _SiloStream, line: Line, who: Principal, older: asyncio.Task[None] | None
    ) -> None:
        silo = line.name
        if older is not None:
            older.cancel()
            await asyncio.wait([older])
        try:
            with self._access.relayed(who):
                await self._above.serve(line)
        except asyncio.CancelledError:
            if not self._access.has_cut(asyncio.current_task()):
                raise
            self._refuse(silo, f"the certificate of {silo!r} has ended or has been revoked")
        except RoundtableError as error:
            self._refuse(silo, str(error))
        except Exception:
            log.exception("the stream of %s by the relay %s failed", silo, self._relay)
        finally:
            if self._streams.get(silo) is stream:
                del self._streams[silo]
                self._tell_ended(silo)

    async def _write(self, silo: str, message: agent_pb2.ToAgent) -> None:
        if message.ByteSize() > MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
            # It would end the streams of all.
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "a message to this silo is too large for a relay"
            )
        said = relay_pb2.SaidToSilo(silo=silo, message=message)
        self.outbox.put(relay_pb2.ToRelay(said=said))

    def _bears(self, bearer: Bearer) -> None:
        """A silo that is away, and whose updates the relay holds: each is signed by the silo itself."""
        try:
            _, key = self._relayed.admit(
                self._relay, bearer.silo, bearer.identity, bearer.installation, bearer.passage
            )
        except IdentityError as error:
            log.warning("%s", error, extra={"site": bearer.silo})
            return
        self._above.bear(bearer, key)

    def _refuse(self, silo: str, reason: str) -> None:
        log.warning("%s is refused by the relay %s: %s", silo, self._relay, reason, extra={"site": silo})
        told = relay_pb2.SaidToSilo(silo=silo, message=to_agents.refused(reason))
        self.outbox.put(relay_pb2.ToRelay(said=told))
        self._tell_ended(silo)

    def _tell_ended(self, silo: str) -> None:
        self.outbox.put(relay_pb2.ToRelay(ended=silo))


def _in_one(said: list[relay_pb2.ToRelay]) -> relay_pb2.ToRelay:
    """One message that holds them all."""
    return said[0] if len(said) == 1 else relay_pb2.ToRelay(several=relay_pb2.SeveralToRelay(messages=said))


class _SiloStream:
    """What a silo has said and nobody has read yet; `None` ends it."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.heard: asyncio.Queue[agent_pb2.FromAgent | None] = asyncio.Queue()

    async def messages(self) -> AsyncIterator[agent_pb2.FromAgent]:
        """As gRPC would give them."""
        while (message := await self.heard.get()) is not None:
            yield message
