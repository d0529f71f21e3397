"""The operators' services called from within the coordinator's process, by the same gate as over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, cast

from google.protobuf.message import Message

from roundtable.server.auth.access import Access, Context, Method
from roundtable.server.auth.principals import Principal

WAITING = 16
"""Messages of a stream that wait for their reader."""


class LocalCalls:
    """What a page in this process may ask: the operators' own calls, each as somebody who has signed in.

    Permissions, quotas, revocation and the audit log are those of `Access`; nothing else leads to a service.
    """

    def __init__(self, access: Access, services: Mapping[str, object]) -> None:
        self._access = access
        self._services = services

    async def call(self, who: Principal, address: str, name: str, request: Message) -> Any:
        """The answer to a call with one, for example "Operators/ListJobs".

        Raises RoundtableError; a Refusal has its status with it.
        """
        return await self._access.perform(self._method(name), name, request, who, address, _context(None))

    async def stream(
        self, who: Principal, address: str, name: str, request: Message
    ) -> AsyncIterator[Message]:
        """What a call answers that answers with a stream. RoundtableError as for `call`."""
        said: asyncio.Queue[Message | None] = asyncio.Queue(WAITING)

        async def run() -> None:
            try:
                await self._access.perform(self._method(name), name, request, who, address, _context(said))
            finally:
                with suppress(asyncio.QueueFull):
                    said.put_nowait(None)

        task = asyncio.get_running_loop().create_task(run())
        try:
            while not (task.done() and said.empty()):
                message = await said.get()
                if message is None:
                    break
                yield message
            if task.done() and not task.cancelled():
                task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    def _method(self, name: str) -> Method:
        service, _, method = name.partition("/")
        return cast(Method, getattr(self._services[service], method))


class _Said:
    """A call's context for methods that write to it."""

    def __init__(self, said: asyncio.Queue[Message | None] | None) -> None:
        self._said = said

    async def write(self, message: Message) -> None:
        assert self._said is not None, "a call with one answer writes none"
        await self._said.put(message)


def _context(said: asyncio.Queue[Message | None] | None) -> Context:
    return cast(Context, _Said(said))
