"""Messages of a call as they come and go: none is waited for without end, none taken that is unreadable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from roundtable.core import errors

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Refusal(errors.RoundtableError):
    """A call that is answered with this status and message."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class PatientContext:
    """A call's context whose `write` does not wait for ever for a caller that reads nothing."""

    def __init__(self, context: Context, name: str, seconds: float) -> None:
        self._context = context
        self._name = name
        self._seconds = seconds

    async def write(self, message: Any) -> None:
        """Sends a message. Refusal if the caller's side takes none for too long."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._context.write(message)
        except TimeoutError:
            raise _too_slow(f"nothing of what {self._name} answers was read", self._seconds) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def in_time(requests: AsyncIterator[Any], name: str, seconds: float) -> AsyncIterator[Any]:
    """The caller's messages. Refusal if the next one does not come in time."""
    messages = aiter(requests)
    while True:
        try:
            async with asyncio.timeout(seconds):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _too_slow(f"the next message to {name} did not come", seconds) from None
        yield message


def _too_slow(problem: str, seconds: float) -> Refusal:
    said = f"{problem} within {seconds:.0f} s: the call is over; make it again, and go on from where it ended"
    return Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, said)


def careful(reader: Callable[[bytes], Any] | None, name: str) -> Callable[[bytes], Any] | None:
    """Wraps a deserializer so that its failures become refusals, where gRPC would log a traceback."""
    if reader is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return reader(data)
        except (DecodeError, ValueError) as error:
            raise _unreadable(name) from error

    return read


def _unreadable(name: str) -> Refusal:
    said = f"a message to {name} cannot be read; is it of this version?"
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, said)
