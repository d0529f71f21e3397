"""The one connection of a silo: dialled out, mutually authenticated, made again for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from roundtable.client.door import incoming, outgoing
from roundtable.client.door.outgoing import FromAgent
from roundtable.core.errors import IdentityError, ProtocolError, RoundtableError, UnavailableError
from roundtable.core.identity.credentials import load_credentials
from roundtable.core.identity.handshake import check_connection, trusted_root
from roundtable.core.identity.revocation import NOTHING, RevocationList
from roundtable.core.observability.logs import request_metadata, requesting
from roundtable.proto import PROTOCOL_VERSION, agent_pb2_grpc
from roundtable.proto.channel import CLIENT_OPTIONS

_log = logging.getLogger("roundtable.agent")
_GREETING_SECONDS = 20.0
_GOODBYE_SECONDS = 5.0
_OPTIONS: tuple[tuple[str, int], ...] = (
    *CLIENT_OPTIONS,
    # Otherwise a new channel inherits the waiting time of one that failed before.
    ("grpc.use_local_subchannel_pool", 1),
)


class Refused(ProtocolError):
    """The coordinator does not want this connection, now or later."""


class Backoff:
    """Waiting times between attempts: doubling up to a limit, each drawn at random below it.

    The full jitter keeps a thousand agents from coming back in the same second.
    """

    def __init__(self, first: float = 0.2, limit: float = 30.0) -> None:
        self._first = first
        self._limit = limit
        self._random = random.Random()
        self.reset()

    def reset(self) -> None:
        """After a success."""
        self._ceiling = self._first

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        wait = self._random.uniform(self._ceiling / 4, self._ceiling)
        self._ceiling = min(2 * self._ceiling, self._limit)
        return wait


class Link:
    """What the rest of the agent sees of the connection, whether it stands or not."""

    def __init__(self) -> None:
        self._stub: agent_pb2_grpc.AgentsAsyncStub | None = None
        self._up = asyncio.Event()
        self._outbox: asyncio.Queue[FromAgent] | None = None

    @property
    def stands(self) -> bool:
        """Whether there is a connection."""
        return self._stub is not None

    async def stub(self) -> agent_pb2_grpc.AgentsAsyncStub:
        """The service, as soon as there is a connection."""
        while self._stub is None:
            await self._up.wait()
        return self._stub

    def send(self, message: FromAgent) -> None:
        """Puts a message on the control stream; it is lost while there is none.

        Nothing depends on it: what the coordinator still waits for it asks for again.
        """
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    def attach(self, stub: agent_pb2_grpc.AgentsAsyncStub, outbox: asyncio.Queue[FromAgent]) -> None:
        """The connection stands."""
        self._stub, self._outbox = stub, outbox
        self._up.set()

    def detach(self) -> None:
        """The connection is gone."""
        self._stub = self._outbox = None
        self._up.clear()


PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.OUT_OF_RANGE,
}
"""What a call may end with and be made again."""

_UNTOLD = "Internal error from Core"
"""What grpc.aio makes of every status that arrives in the moment of a write."""


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Calls inside fail with UnavailableError where trying again may help, else with ProtocolError.

    They have an identifier of their own (`request_metadata`), which the error names.
    """
    identifier = ""
    try:
        with requesting() as identifier:
            _log.debug("calls the coordinator; if that fails, %s", what)
            yield
    except grpc.aio.AioRpcError as error:
        kind = UnavailableError if error.code() in PASSING else ProtocolError
        said = f"{error.details()} ({error.code().name}, request {identifier})"
        raise kind(f"{what}: {said}") from error
    except grpc.aio.UsageError as error:
        raise UnavailableError(f"{what}: the connection was closed meanwhile") from error
    except asyncio.CancelledError:
        # A channel that closes cancels its calls; that is a lost connection, and no wish of ours.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError(f"{what}: the connection is gone") from None


@asynccontextmanager
async def open_channel(
    address: str, credentials: Path, revoked: RevocationList = NOTHING
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with the credentials of that folder as they are now: renewed ones need no restart.

    IdentityError for a coordinator whose certificate is on the list; nothing is sent to it.
    """
    held = load_credentials(credentials)
    trusted = await asyncio.to_thread(trusted_root, address, credentials, revoked=revoked)
    secrets = grpc.ssl_channel_credentials(trusted, held.key, held.certificate)
    async with grpc.aio.secure_channel(address, secrets, options=_OPTIONS) as channel:
        yield channel


async def either(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends, which decides how this ends; the others are cancelled."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def explain(error: grpc.aio.AioRpcError, address: str, credentials: Path) -> RoundtableError:
    """A failed connection as an error that says what to do; makes a handshake of its own to find out."""
    code, details = error.code(), error.details() or "no details"
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return IdentityError(f"the coordinator at {address} does not accept this agent: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(
            f"{address} does not speak this agent's protocol (version {PROTOCOL_VERSION}); "
            "install the version of roundtable that the coordinator has, or check the address"
        )
    try:
        await asyncio.to_thread(check_connection, address, credentials)
    except RoundtableError as cause:
        return cause
    if details == _UNTOLD:
        details = "it ended while this agent was writing; the next attempt may learn why"
    return UnavailableError(f"the connection to {address} failed: {details} ({code.name})")


class ControlStream:
    """One control stream, from Hello to its end."""

    def __init__(self, stub: agent_pb2_grpc.AgentsAsyncStub) -> None:
        self._call = stub.Connect(metadata=request_metadata())  # type: ignore[call-arg]
        self._heard = time.monotonic()
        self.outbox: asyncio.Queue[FromAgent] = asyncio.Queue()

    async def greet(
        self, hello: FromAgent, prove: Callable[[bytes], bytes] | None = None
    ) -> incoming.Welcome:
        """Says Hello and returns the Welcome; Refused if that is the answer, and no answer is an error.

        `prove` signs the coordinator's challenge, where the hello names an installation.
        """
        await self._put(hello)
        answer = await self._answer()
        if isinstance(answer, incoming.Challenge) and prove is not None:
            await self._put(outgoing.proof(prove(answer.nonce)))
            answer = await self._answer()
        match answer:
            case incoming.Welcome():
                return answer
            case incoming.BadMessage(reason):
                raise ProtocolError(reason)
            case _:
                raise ProtocolError(f"the coordinator began with {type(answer).__name__}, not with a welcome")

    async def _answer(self) -> incoming.Message:
        """The coordinator's next message of the greeting; Refused where it is that."""
        try:
            answer = await asyncio.wait_for(self._call.read(), _GREETING_SECONDS)
        except TimeoutError:
            raise UnavailableError(f"the coordinator did not answer within {_GREETING_SECONDS:g} s") from None
        if answer is EOF:
            # The status of the ended call says why.
            await self._fail()
        decoded = incoming.message_of(answer)
        if isinstance(decoded, incoming.Dismissal):
            raise Refused(f"the coordinator refused this agent: {decoded.reason}")
        return decoded

    async def run(
        self, beat: float, handle: Callable[[incoming.Message], None], state: Callable[[], str]
    ) -> None:
        """Serves the stream until it ends, which is always an error: UnavailableError or Refused."""
        try:
            await either(self._read(handle), self._write(), self._heartbeats(beat, state))
        finally:
            self._call.cancel()

    async def leave(self, reason: str) -> None:
        """Says Goodbye on a stream that nobody runs, and waits a moment for the coordinator to end it."""
        await self._put(outgoing.goodbye(reason))
        async with asyncio.timeout(_GOODBYE_SECONDS):
            await self._call.code()

    async def _read(self, handle: Callable[[incoming.Message], None]) -> None:
        while (message := await self._call.read()) is not EOF:
            self._heard = time.monotonic()
            decoded = incoming.message_of(message)
            if isinstance(decoded, incoming.Dismissal):
                raise Refused(f"the coordinator ended the connection: {decoded.reason}")
            handle(decoded)
        await self._fail()

    async def _fail(self) -> None:
        """Raises what the ended call says of its end."""
        code = await self._call.code()
        if code == grpc.StatusCode.OK:
            raise UnavailableError("the coordinator closed the connection")
        raise grpc.aio.AioRpcError(
            code,
            await self._call.initial_metadata(),
            await self._call.trailing_metadata(),
            await self._call.details(),
            None,
        )

    async def _write(self) -> None:
        while True:
            await self._put(await self.outbox.get())

    async def _put(self, message: FromAgent) -> None:
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            await self._fail()

    async def _heartbeats(self, beat: float, state: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(beat)
            if time.monotonic() - self._heard > 3 * beat + 1:
                raise UnavailableError(f"the coordinator has been silent for more than {3 * beat:g} s")
            self.outbox.put_nowait(outgoing.heartbeat(state()))
