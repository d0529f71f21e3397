"""Starts a silo's replicas, and learns why one was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from roundtable.client.policy.config import AgentConfig
from roundtable.cluster.agent.failed_ranks import RanksLost, advise, cause_of
from roundtable.cluster.agent.launcher import Launcher
from roundtable.cluster.agent.rank_group import RankGroup
from roundtable.cluster.agent.replica_groups import ReplicaGroups
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.fellow_replicas import FIRST_RANK, REPLICA
from roundtable.cluster.train.orders import Advice, take_reports


class ReplicaStarts:
    """`groups` are the replicas, which this starts and starts again."""

    def __init__(
        self,
        config: AgentConfig,
        folder: Path,
        launcher: Launcher,
        find: Callable[[], Resources],
        leave_settings: Callable[[Resources], None],
    ) -> None:
        """`folder` is the cluster's state; `launcher` starts ranks; `find` gives the present resources."""
        assert config.cluster is not None
        self._folder = folder
        self._launcher = launcher
        self._find = find
        self._leave_settings = leave_settings
        table = config.cluster
        self._timeout = table.timeout
        self.groups = ReplicaGroups(
            table.replica_devices, table.timeout, self.usable, self.launch, self.learn
        )

    async def usable(self) -> list[int]:
        """The devices that a replica may be started on now."""
        resources = await asyncio.to_thread(self._find)
        return Advice.read(self._folder).usable(resources.devices)

    async def launch(self, index: int, devices: list[int]) -> RankGroup:
        """Starts a replica's ranks on these devices."""
        resources = await asyncio.to_thread(self._find)
        here = Resources(1, len(devices), resources.memory, resources.device)
        self._leave_settings(here)
        named = {REPLICA: str(index), FIRST_RANK: str(index * len(devices))}
        return await self._launcher.start(here, devices, named)

    def learn(self, index: int, devices: list[int], group: RankGroup, said: str) -> str:
        """Why a replica was lost, in words, once what that means for its next start is written down."""
        ranks = range(index * len(devices), (index + 1) * len(devices))
        first = cause_of(take_reports(self._folder, ranks), group, RanksLost(said), self._timeout)
        advise(self._folder, first, devices)
        return first.detail
