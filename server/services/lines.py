"""An agent's control stream as the coordinator serves it: a connection of its own, or one through a relay."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from roundtable.core.identity import certificates as x
from roundtable.core.identity.lifetimes import Lifetime
from roundtable.proto import TOGETHER_BYTES, agent_pb2, relay_pb2
from roundtable.server.auth.access import Context, address_of, caller
from roundtable.server.jobs.sessions import ShownCertificate


@dataclass(frozen=True)
class Line:
    """Who is at the other end, what it has shown, both directions; `relay` is the one in between, or ""."""

    name: str
    shown: ShownCertificate
    address: str
    requests: AsyncIterator[agent_pb2.FromAgent]
    write: Callable[[agent_pb2.ToAgent], Awaitable[object]]
    relay: str = ""


Said = TypeVar("Said", relay_pb2.FromRelay, relay_pb2.ToRelay)


GATHERING = 0.05
"""Seconds between two messages of a trunk, unless more waits than one holds: what comes meanwhile shares the
next one."""


MOST_WAITING = 200_000
"""Messages of a trunk that wait to be read: several for each of the most silos that a relay may have."""


class Outbox(Generic[Said]):
    """Messages of a trunk on their way, oldest first; `None` ends it, and so do more than may wait: who is at
    the other end reads nothing, or says what leads to more answers than it takes."""

    def __init__(self) -> None:
        self._waiting: deque[Said | None] = deque()
        self._came = asyncio.Event()
        self._taken = 0.0
        self._emptied = False

    def put(self, message: Said | None) -> None:
        """Queues a message."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.clear()
            message = None
        self._waiting.append(message)
        self._came.set()

    async def take(self, most: int) -> list[Said]:
        """Waits for the next message, and takes those behind it, too: so many, and so many bytes, as travel
        in one. Empty at the end."""
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        rest = self._taken + GATHERING - time.monotonic()
        if most > 1 and self._emptied and rest > 0.0:
            await asyncio.sleep(rest)
        self._taken = time.monotonic()
        taken: list[Said] = []
        size = 0
        while self._waiting and len(taken) < most and (message := self._waiting[0]) is not None:
            size += message.ByteSize()
            if taken and size > TOGETHER_BYTES:
                break
            taken.append(message)
            self._waiting.popleft()
        self._emptied = not self._waiting
        return taken


def line_of(requests: AsyncIterator[agent_pb2.FromAgent], context: Context) -> Line:
    """The line of an agent that has connected itself."""
    shown = shown_in(next(iter(context.auth_context()["x509_pem_cert"])))
    return Line(caller(context), shown, address_of(context), requests, context.write)


def shown_in(pem: bytes) -> ShownCertificate:
    """The certificate by which a party is known; IdentityError for what is none."""
    own = x.certificates_in(pem, "the connection's certificate")[0]
    return ShownCertificate(hashlib.sha256(x.public_bytes(own.public_key())).hexdigest(), Lifetime.of(own))
