"""A clock that is never set: jumps of the machine's clock move no deadline.

It starts at the machine's time and counts on by itself, so that times of one process are in order. Deadlines
that a restart finds in the database are bounded by the job's own times (`RoundEngine.outstanding`).
"""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger("roundtable.server.clock")

LOOK_SECONDS = 10.0
NOTED_SECONDS = 5.0
_START = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix time by the machine's clock as it was set when the process started."""
    return _START + time.monotonic()


async def watch_clock() -> None:
    """Logs when the machine's clock was set; runs until cancelled."""
    known = time.time() - steady_time()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        known = note_jump(known)


def note_jump(known: float) -> float:
    """Returns the machine's clock minus ours in seconds; logs it if it has changed from `known`."""
    now = time.time() - steady_time()
    if abs(now - known) > NOTED_SECONDS:
        log.warning(
            "the machine's clock was set %s by %.0f s: no deadline moves; times in the history follow it "
            "from the next start on",
            "forward" if now > known else "back",
            abs(now - known),
        )
        return now
    return known
