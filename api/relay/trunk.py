"""The relay's one connection: dialled out to the coordinator, made again for as long as it takes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from roundtable.client.agent.connection import Backoff, Link, either, explain, open_channel
from roundtable.client.agent.revocations import Revocations
from roundtable.core import bounds
from roundtable.core.errors import IdentityError, ProtocolError, RoundtableError, UnavailableError
from roundtable.core.evidence.release import release
from roundtable.core.foreign_text import printable
from roundtable.core.identity.credentials import load_credentials
from roundtable.core.observability.logs import request_metadata, requesting
from roundtable.proto import (
    MAX_MESSAGE_BYTES,
    MOST_TOGETHER,
    PROTOCOL_VERSION,
    relay_pb2,
    relay_pb2_grpc,
)
from roundtable.proto.pieces import agents_stub
from roundtable.relay.config import RelayConfig
from roundtable.server.services.lines import Outbox

log = logging.getLogger("roundtable.relay")

GREETING_SECONDS = 20.0
BEAT_SECONDS = (0.05, 3600.0)
LONGEST_PAUSE = 5.0
"""Before it dials again, in seconds: relays are few, and a whole region waits behind each."""


class Trunk:
    """The streams of all silos of the region, on one stream to the coordinator.

    `joined` is called once the stream stands, `hear` with what the coordinator says on it. `link` gives the
    coordinator's calls for agents, `relays` those for relays.
    """

    def __init__(
        self,
        config: RelayConfig,
        revocations: Revocations,
        joined: Callable[[], None],
        hear: Callable[[relay_pb2.ToRelay], None],
    ) -> None:
        self._config = config
        self._revocations = revocations
        self._joined = joined
        self._hear = hear
        self._outbox: Outbox[relay_pb2.FromRelay] | None = None
        self._heard = 0.0
        self._complaint = ""
        self.coordinator = ""
        self._addresses = itertools.cycle((config.coordinator, *config.standbys))
        self.link = Link()
        self.relays = Link()

    @property
    def stands(self) -> bool:
        """Whether there is a connection."""
        return self._outbox is not None

    def send(self, message: relay_pb2.FromRelay) -> None:
        """Puts a message on the stream; it is lost while there is none.

        Nothing depends on it: the coordinator asks again for what it waits for, once a silo is there again.
        """
        if self._outbox is not None:
            self._outbox.put(message)

    async def run(self) -> None:
        """Connects again and again; raises what no attempt can heal, as being refused."""
        backoff = Backoff(limit=LONGEST_PAUSE)
        while True:
            try:
                with requesting():
                    await self._serve(next(self._addresses), backoff)
            except ProtocolError:
                raise
            except RoundtableError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("not connected: %s; trying again, silos stay", error)
            await asyncio.sleep(backoff.next())

    async def _serve(self, address: str, backoff: Backoff) -> None:
        credentials = self._config.credentials
        try:
            revoked = self._revocations.current()
            async with open_channel(address, credentials, revoked) as channel:
                call: Any = relay_pb2_grpc.RelaysStub(channel).Trunk(metadata=request_metadata())  # type: ignore[call-arg]
                try:
                    welcome = await self._greet(call)
                    log.info("connected to %s", address)
                    self._complaint, self._heard = "", time.monotonic()
                    self._learn(welcome.revocations)
                    self.coordinator = printable(welcome.coordinator, 200)
                    outbox = self._outbox = Outbox[relay_pb2.FromRelay]()
                    # Its own outbox is for agents' messages, which here travel on the trunk.
                    self.link.attach(agents_stub(channel), asyncio.Queue())
                    stub: Any = relay_pb2_grpc.RelaysStub(channel)
                    self.relays.attach(stub, asyncio.Queue())
                    backoff.reset()
                    self._joined()
                    await either(
                        self._read(call),
                        self._write(call, outbox, min(max(1, welcome.together), MOST_TOGETHER)),
                        self._beat(_seconds(welcome.heartbeat_seconds)),
                        self._revocations.watch(revoked),
                    )
                finally:
                    self._outbox = None
                    self.link.detach()
                    self.relays.detach()
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            raise await explain(error, address, credentials) from error

    async def _greet(self, call: Any) -> relay_pb2.RelayWelcome:
        hello = relay_pb2.RelayHello(
            version=release().version,
            protocol=PROTOCOL_VERSION,
            clock=time.time(),
            together=MOST_TOGETHER,
        )
        await _put(call, relay_pb2.FromRelay(hello=hello))
        try:
            answer = await asyncio.wait_for(call.read(), GREETING_SECONDS)
        except TimeoutError:
            raise UnavailableError(f"the coordinator did not answer within {GREETING_SECONDS:g} s") from None
        if answer is EOF:
            await _fail(call)
        if answer.WhichOneof("message") == "refused":
            raise ProtocolError(f"the coordinator refused this relay: {printable(answer.refused)}")
        if answer.WhichOneof("message") != "welcome":
            raise UnavailableError("the coordinator did not begin with a welcome")
        welcome: relay_pb2.RelayWelcome = answer.welcome
        return welcome

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not EOF:
            self._heard = time.monotonic()
            several = message.WhichOneof("message") == "several"
            for each in message.several.messages if several else [message]:
                self._take(each)
        await _fail(call)

    def _take(self, message: relay_pb2.ToRelay) -> None:
        match message.WhichOneof("message"):
            case "beat":
                pass
            case "refused":
                raise ProtocolError(f"the coordinator ended the connection: {printable(message.refused)}")
            case "revocations":
                self._learn(message.revocations)
            case _:
                self._hear(message)

    async def _write(self, call: Any, outbox: Outbox[relay_pb2.FromRelay], most: int) -> None:
        while said := await outbox.take(most):
            several = relay_pb2.SeveralFromRelay(messages=said)
            await _put(call, said[0] if len(said) == 1 else relay_pb2.FromRelay(several=several))

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            if time.monotonic() - self._heard > 3 * seconds + 1:
                raise UnavailableError(f"the coordinator has been silent for more than {3 * seconds:g} s")
            self.send(relay_pb2.FromRelay(beat=relay_pb2.RelayBeat()))

    def _learn(self, pem: bytes) -> None:
        if len(pem) <= MAX_MESSAGE_BYTES:
            self._revocations.learn(pem)


def name_of(credentials: Path) -> str:
    """The relay's name; IdentityError for credentials that are not a relay's."""
    held = load_credentials(credentials)
    if held.role != "relay":
        raise IdentityError(
            f"the certificate of {held.name!r} is one of {held.role}; a relay needs one with the role relay: "
            f"`roundtable ca issue {held.name} --role relay --host HOSTNAME`"
        )
    return held.name


def _seconds(value: float) -> float:
    try:
        return bounds.within(value, *BEAT_SECONDS, "the seconds between heartbeats")
    except ProtocolError as error:
        raise UnavailableError(str(error)) from error


async def _put(call: Any, message: relay_pb2.FromRelay) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        await _fail(call)


async def _fail(call: Any) -> None:
    """Raises what the ended call says of its end."""
    code = await call.code()
    if code == grpc.StatusCode.OK:
        raise UnavailableError("the coordinator closed the connection")
    raise grpc.aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), await call.details(), None
    )
