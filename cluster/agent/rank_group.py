"""A running group of ranks, as the agent sees it: what they print, and how they ended."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable

from roundtable.client.device_faults import DeviceFault, device_fault
from roundtable.core.machine.stop_signals import KILL

_log = logging.getLogger("roundtable.agent")
_LINE = 2000
_ENDS = re.compile(r"[\r\n]+")
# NCCL's watchdog ends a rank whose device has failed before Python hears of it; this is all that it leaves.
_WATCHDOG = re.compile(r"Rank (\d+)\] .{0,200}?watchdog thread terminated with exception: (.*)")
_LAST_WORDS_SECONDS = 1.0


class Printed:
    """What processes print into a pipe, however it is printed: who does not read blocks who writes.

    A progress bar ends its lines with carriage returns, or with nothing at all; what has no end is cut.
    """

    def __init__(self, name: str, hear: Callable[[str], None] = lambda line: None) -> None:
        """`name` stands before each line in the log; `hear` gets each line too."""
        self._name = name
        self._hear = hear
        self._kept: deque[str] = deque(maxlen=40)

    @property
    def error(self) -> str:
        """The last line that names an error; empty where none does."""
        return next((line for line in reversed(self._kept) if "rror" in line), "")

    @property
    def last(self) -> str:
        """The last line."""
        return self._kept[-1] if self._kept else ""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Reads and logs until nobody can write any more."""
        rest = ""
        while piece := await stream.read(1 << 16):
            *lines, rest = _ENDS.split(rest + piece.decode(errors="replace"))
            if len(rest) > _LINE:
                lines, rest = [*lines, rest[:_LINE]], ""
            for line in lines:
                self._take(line)
        self._take(rest)

    def _take(self, line: str) -> None:
        if text := line.strip()[:_LINE]:
            self._kept.append(text)
            self._hear(text)
            _log.info("%s: %s", self._name, text)


class RankGroup:
    """Ranks that were forked together; they end together too."""

    def __init__(
        self, number: int, output: int, end: Callable[[], None], why_none: Callable[[], str]
    ) -> None:
        """`output` is the descriptor to read what they print from, which this owns; `end` has them ended.

        `why_none` says what is known of it where the process that they are forked from is gone.
        """
        self.number = number
        self._end = end
        self._why_none = why_none
        self._over = asyncio.Event()
        self._how = ""
        self._watchdog: list[tuple[int, str]] = []
        self._printed = Printed("ranks", self._heed)
        self._listener = asyncio.create_task(self._listen(output))

    async def ended(self) -> None:
        """Waits until none of them is left."""
        await self._over.wait()

    async def settled(self, seconds: float = 2.0) -> bool:
        """Whether they have ended by themselves within so long; what they printed has then been read."""
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return False
        await asyncio.wait({self._listener}, timeout=_LAST_WORDS_SECONDS)
        return True

    def last_failure(self) -> str:
        """How the first of them ended, and the last line that names an error."""
        return "; ".join(part for part in (self._how, self._printed.error) if part) or self._printed.last

    def device_fault(self) -> tuple[int, DeviceFault] | None:
        """(rank, fault) of the first device that ended its rank unreported since this was asked last."""
        ended, self._watchdog = self._watchdog, []
        faults = ((rank, device_fault(text)) for rank, text in ended)
        return next(((rank, fault) for rank, fault in faults if fault is not None), None)

    async def end(self) -> None:
        """Ends them, and waits until they have."""
        if not self._over.is_set():
            self._end()
            await self._over.wait()
        await self.settled()
        self._listener.cancel()

    def over(self, rank: int, status: int, why: str) -> None:
        """None of them is left; this one ended first, with this status, a signal's if below 0, or `why`."""
        if rank < 0:
            self._how = why
        elif status < 0:
            self._how = f"rank {rank} was ended by {_signal(-status)}"
        else:
            self._how = f"rank {rank} ended with status {status}"
        self._over.set()

    def lost(self, why: str) -> None:
        """The process that they were forked from is gone, and they with it."""
        if not self._over.is_set():
            self._how = "; ".join(part for part in (why, self._why_none()) if part)
            self._over.set()

    async def _listen(self, output: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", 0)
        )
        try:
            await self._printed.read(reader)
        finally:
            transport.close()

    def _heed(self, line: str) -> None:
        if (ended := _WATCHDOG.search(line)) and len(self._watchdog) < 1000:
            self._watchdog.append((int(ended[1]), ended[2]))


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name}, by somebody or by the kernel for want of memory" if number == KILL else name
