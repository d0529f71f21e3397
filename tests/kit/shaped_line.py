"""A line of bounded speed and some delay on loopback, before a coordinator that runs in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PIECE = 1 << 12


async def _carry(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, rate: float, delay: float
) -> None:
    """One direction: `rate` bytes a second, each `delay` seconds late, no more buffered than is under way."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4)

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            target.write(data)
            await target.drain()

    delivering = asyncio.create_task(deliver())
    free = time.monotonic()
    try:
        while data := await source.read(PIECE):
            free = max(free, time.monotonic()) + len(data) / rate
            await asyncio.sleep(max(0.0, free - time.monotonic()))
            await under_way.put((time.monotonic() + delay, data))
    finally:
        delivering.cancel()
        target.close()


@asynccontextmanager
async def shaped_line(port: int, rate: float, round_trip: float) -> AsyncIterator[int]:
    """A port that leads to `port` over a line of `rate` bytes a second each way."""
    carrying: set[asyncio.Task[object]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
        for source, target in ((reader, back), (onward, writer)):
            task = asyncio.ensure_future(_carry(source, target, rate, round_trip / 2))
            carrying.add(task)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=PIECE)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)
