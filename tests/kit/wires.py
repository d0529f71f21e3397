"""TCP connections that can be made slow, thin, cut, half open or wrong: a network for tests, in a thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

_PIECE = 16 << 10


@dataclass
class Wire:
    """One listening port that leads to another. The settings may be changed at any time.

    `delay` is in seconds for each piece, `rate` in bytes a second; `cut` refuses and closes, `silent`
    swallows what comes while connections seem to stand, `wrong` flips a bit in so many further pieces, `left`
    lets so many further bytes come back and then closes what is open, once.
    """

    target: int
    port: int = 0
    delay: float = 0.0
    rate: float = 0.0
    cut: bool = False
    silent: bool = False
    wrong: int = 0
    left: int | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def heal(self) -> None:
        """Carries bytes again, both ways, without delay."""
        self.delay = self.rate = 0.0
        self.cut = self.silent = False
        self.wrong = 0
        self.left = None


class Wires:
    """All wires of a test, served by one thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()

    def lay(self, target: int) -> Wire:
        """A new wire to a port of this machine."""
        wire = Wire(target)
        asyncio.run_coroutine_threadsafe(self._listen(wire), self._loop).result()
        return wire

    def cut(self, wire: Wire) -> None:
        """Closes what is open and refuses what is new, until it is healed."""
        wire.cut = True
        self._loop.call_soon_threadsafe(self._drop, wire)

    def reset(self, wire: Wire) -> None:
        """Heals it; connections that stood half open are closed, as no machine keeps them for ever."""
        wire.heal()
        self._loop.call_soon_threadsafe(self._drop, wire)

    def close(self) -> None:
        """Stops the thread that carries the bytes of all wires."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @staticmethod
    def _drop(wire: Wire) -> None:
        for writer in list(wire.writers):
            writer.transport.abort()

    async def _listen(self, wire: Wire) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connected(wire, reader, writer)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        wire.port = server.sockets[0].getsockname()[1]

    async def _connected(
        self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if wire.cut:
                return
            there, back = await asyncio.open_connection("127.0.0.1", wire.target)
        except OSError:
            writer.transport.abort()
            return
        finally:
            if wire.cut:
                writer.transport.abort()
        wire.writers |= {writer, back}
        try:
            ways = [self._carry(wire, reader, back), self._carry(wire, there, writer, back=True)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            for end in (writer, back):
                end.transport.abort()
                wire.writers.discard(end)

    async def _carry(
        self, wire: Wire, source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: bool = False
    ) -> None:
        try:
            while data := await source.read(_PIECE):
                if wire.delay or wire.rate:
                    await asyncio.sleep(wire.delay + (len(data) / wire.rate if wire.rate else 0.0))
                if wire.silent:
                    continue
                if wire.wrong > 0:
                    wire.wrong -= 1
                    data = bytes([data[0] ^ 1]) + data[1:]
                last = back and wire.left is not None and len(data) >= wire.left
                if back and wire.left is not None:
                    data = data[: wire.left]
                    wire.left = None if last else wire.left - len(data)
                sink.write(data)
                await sink.drain()
                if last:
                    # A close, not a reset: what has passed arrives.
                    sink.close()
                    return
        except OSError:
            return
