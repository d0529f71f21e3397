"""Pools of silos that an operator's autoscaler starts and ends: what each has to do, by the queue of jobs.

Silos are at work while a job that suits them has its turn, drawn or not: nobody learns of a draw.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from roundtable.core.config import JobConfig
from roundtable.core.hooks.node_pool import PoolLoad, PoolTable
from roundtable.core.job_tables.queue_table import Labels, covers
from roundtable.core.toml_tables import Names
from roundtable.server.queue.standing import Contender
from roundtable.server.store import AgentRow

MOST_TOLD = 100


class SiloPoolTable(PoolTable):
    """`[pools.NAME]` of coordinator.toml: silos that a command starts and ends, each of them a node."""

    labels: Labels = Field(
        default_factory=dict, max_length=20, description="[metadata] by which its silos are known"
    )
    tasks: Names = Field(
        min_length=1, description="names of the tasks that its silos have; jobs of others ask for none"
    )
    gpus: int = Field(0, ge=0, le=10_000, description="of each silo; jobs that need more ask for none")

    def suits(self, job: JobConfig) -> bool:
        """Whether another silo of the pool would help this job."""
        return job.task.name in self.tasks and job.resources.suits(self.labels, {"gpus": self.gpus})


@dataclass(frozen=True)
class _Lacking:
    """A job that waits for silos of a pool."""

    contender: Contender
    job: JobConfig
    silos: int
    waited: float

    @property
    def told(self) -> dict[str, Any]:
        contender, needs = self.contender, self.job.resources
        return {
            "job": contender.job,
            "name": contender.name,
            "project": contender.project,
            "waited": self.waited,
            "silos": contender.least,
            "lacking": self.silos,
            "gpus": needs.gpus,
            "memory": needs.memory_bytes,
            "disk": needs.disk_bytes,
            "labels": needs.labels,
        }


def load_of(
    pool: SiloPoolTable,
    jobs: Iterable[tuple[Contender, JobConfig]],
    silos: Collection[AgentRow],
    now: float,
) -> PoolLoad:
    """What the pool has to do. `jobs`: those that are neither over nor paused; `silos`: the connected ones.

    A silo that a waiting job can count on is at work, so that none goes while others of its job come.
    """
    connected = {silo.name for silo in silos}
    mine = {silo.name for silo in silos if covers(pool.labels, silo.metadata)}
    waiting, taken = list[tuple[Contender, JobConfig]](), set[str]()
    for contender, job in jobs:
        if contender.turn and not contender.starved:
            taken |= contender.silos & connected
        elif not contender.blocked and contender.earliest <= now:
            waiting.append((contender, job))
    lacking = []
    for contender, job in sorted(waiting, key=lambda each: (-each[0].priority, each[0].waits_from)):
        # Those that are of no pool come first: they are there anyway.
        free = sorted((contender.silos & connected) - taken, key=lambda name: (name in mine, name))
        taken.update(free[: contender.least])
        missing = contender.least - len(free)
        if missing > 0 and pool.suits(job):
            lacking.append(_Lacking(contender, job, missing, now - contender.waits_from))
    return PoolLoad(
        busy=len(mine & taken),
        lacking=sum(each.silos for each in lacking),
        waited=max((each.waited for each in lacking), default=0.0),
        told=_told(lacking, mine, taken),
    )


def _told(lacking: Sequence[_Lacking], mine: set[str], taken: set[str]) -> dict[str, Any]:
    return {
        "waiting": [each.told for each in lacking[:MOST_TOLD]],
        "connected": len(mine),
        "idle": sorted(mine - taken)[:MOST_TOLD],
    }
