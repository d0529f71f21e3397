"""Work that goes on for as long as the coordinator: what breaks it off is logged, and it begins anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from roundtable.server.store.database import LeaseLost

log = logging.getLogger("roundtable.server")

PAUSE_SECONDS = 10.0
LastingWork: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


async def lasting(name: str, work: LastingWork) -> None:
    """Does the work until it ends by itself, another coordinator has taken over, or it is cancelled."""
    while True:
        try:
            await work()
            return
        except LeaseLost:
            return
        except Exception:
            log.exception("%s broke off; it begins anew in %.0f s", name, PAUSE_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)
