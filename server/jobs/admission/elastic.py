"""Keeps the pools of silos that operators' autoscalers size, each by a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from roundtable.core.hooks.node_pool import PoolKeeper, PoolLoad
from roundtable.server.jobs.admission.turns import Turns
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.incidents import autoscaler_incident
from roundtable.server.queue.silo_pools import SiloPoolTable, load_of
from roundtable.server.store import AgentRow


class Elastic:
    """Runs while the coordinator is the active one; another that takes over begins with what there is."""

    def __init__(
        self,
        tables: Mapping[str, SiloPoolTable],
        runners: Callable[[], Iterable[JobRunner]],
        silos: Callable[[], Iterable[AgentRow]],
        turns: Turns,
        alerts: Alerts,
        clock: Callable[[], float],
    ) -> None:
        self._runners = runners
        self._silos = silos
        self._turns = turns
        self._alerts = alerts
        self._clock = clock
        self._keepers = [
            PoolKeeper(name, table, partial(self._load, table), partial(self._failed, name))
            for name, table in tables.items()
        ]

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(*(keeper.run() for keeper in self._keepers))

    def _load(self, table: SiloPoolTable) -> PoolLoad:
        jobs = {runner.row.id: runner.job for runner in self._runners()}
        contenders = [(each, jobs[each.job]) for each in self._turns.contenders()]
        return load_of(table, contenders, list(self._silos()), self._clock())

    def _failed(self, name: str, reason: str) -> None:
        self._alerts.tell(autoscaler_incident(), f"pool {name}: {reason}", self._clock())
