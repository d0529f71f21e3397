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
from roundtable.core.machine.process_facts import memory_kills
from roundtable.core.machine.stop_signals import KILL

_log = logging.getLogger("roundtable.agent")
_LINE = 2000
_ENDS = re.compile(r"[\r\n]+")
# NCCL's watchdog ends a rank whose device has failed before Python hears of it; this is all that it leaves.
_WATCHDOG = re.compile(r"Rank (\d+)\] .{0,200}?watchdog thread terminated with exception: (.*)")
_LAST_WORDS_SECONDS = 1.0
_KILLED = "by somebody or by the kernel for want of memory"


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
        self,
        number: int,
        output: int,
        end: Callable[[], None],
        why_none: Callable[[], str],
        ranks: range = range(1),
        *,
        in_parts: bool = False,
    ) -> None:
        """`output` is the descriptor to read what they print from, which this owns; `end` has them ended.

        `why_none` says what is known of it where the process that they are forked from is gone; `ranks` are
        their numbers among all of the silo. `in_parts`: they train in main memory, and need less of it with
        smaller parts of a batch.
        """
        self.number = number
        self.ranks = ranks
        self.first: int | None = None
        self.in_parts = in_parts
        self.starved = ""
        self._kills_before = memory_kills()
        self._end = end
        self._why_none = why_none
        self._over = asyncio.Event()
        self._how = ""
        self._ended_here = False
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
        said = "; ".join(part for part in (self._how, self._printed.error) if part)
        return said or ("" if self._ended_here else self._printed.last)

    def how_it_ended(self) -> str:
        """The same without what they printed where somebody else has ended it, of which it knew nothing."""
        return self._how if _KILLED in self._how else self.last_failure()

    def device_fault(self) -> tuple[int, DeviceFault] | None:
        """(rank, fault) of the first device that ended its rank unreported since this was asked last."""
        ended, self._watchdog = self._watchdog, []
        faults = ((rank, device_fault(text)) for rank, text in ended)
        return next(((rank, fault) for rank, fault in faults if fault is not None), None)

    async def end(self) -> None:
        """Ends them, and waits until they have."""
        if not self._over.is_set():
            self._ended_here = True
            self._end()
            await self._over.wait()
        await self.settled()
        self._listener.cancel()

    def over(self, rank: int, status: int, why: str) -> None:
        """None of them is left; this one ended first, with this status, a signal's if below 0, or `why`."""
        if rank < 0:
            self._how = why
        elif not self._ended_here:
            # What was ended from here has not ended by itself, and is no reason.
            self.first = self.ranks.start + rank
            ended = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
            self._how = f"rank {self.first} {ended}"
            kills = memory_kills()
            if -status == KILL and None not in (kills, self._kills_before) and kills != self._kills_before:
                self.starved = (
                    "the kernel's count of processes that it has ended for want of memory rose from "
                    f"{self._kills_before} to {kills}"
                )
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
    return f"{name}, {_KILLED}" if number == KILL else name
