"""Calls whose end is what the coordinator said, and not what gRPC's client made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

T = TypeVar("T")
_UNTOLD = "Internal error from Core"


async def definite(call: Callable[[], Awaitable[T]]) -> T:
    """Makes the call, again where gRPC cannot say how it ended.

    grpc.aio throws the status of a call away when the coordinator ends it in the moment of a write, which
    happens to up to one refused upload in a hundred: the writer is told "Internal error from Core". Agents
    try again; so do tests.
    """
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.details() != _UNTOLD:
                raise
