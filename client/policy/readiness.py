"""Whether the silo takes new rounds: a person may have drained it, or a check of its own says no."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from roundtable.client.policy.health import HealthChecks
from roundtable.client.policy.maintenance import Drained, Maintenance

BY_CHECK = "a health check"


class Readiness:
    """Both reasons in one: a person's goes first."""

    def __init__(self, state: Path, health: HealthChecks) -> None:
        self._maintenance = Maintenance(state)
        self._health = health
        self._drained: Drained | None = None
        self._unwell: Drained | None = None

    async def watch(self, changed: Callable[[Drained | None], None]) -> None:
        """Calls `changed` with what holds at first, if no rounds are taken, and whenever that changes."""

        def drained(found: Drained | None) -> None:
            self._drained = found
            changed(found or self._unwell)

        def unwell(reason: str) -> None:
            self._unwell = Drained(f"not ready: {reason}", BY_CHECK, time.time()) if reason else None
            if self._drained is None:
                changed(self._unwell)

        await asyncio.gather(self._maintenance.watch(drained), self._health.watch(unwell))
