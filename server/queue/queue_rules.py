"""What an operator sets for the queue of jobs: how fast waiting counts, and what projects may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.queue_table import QueueTable
from roundtable.core.toml_tables import Names, Table
from roundtable.server.queue.timeline import Amounts, Spot

ALL = Spot("all", "")


class ProjectTable(Table):
    """`[projects.NAME]` of coordinator.toml: a project's weight among others, and its quota at one time."""

    weight: float = Field(1.0, gt=0, le=1000, description="its share counts as so many times smaller")
    jobs: int | None = Field(None, ge=1, description="jobs that have their turn at a time")
    silos: int | None = Field(
        None, ge=1, description="silos at a time, over all its jobs; one that serves two jobs counts twice"
    )
    gpus: int | None = Field(None, ge=0, description="GPUs at a time, over all its jobs and silos")
    members: Names | None = Field(
        None, description="data scientists whose jobs may count for it; default: all of them"
    )

    @property
    def amounts(self) -> Amounts:
        """What is limited, and to how much."""
        limits = {"jobs": self.jobs, "silos": self.silos, "gpus": self.gpus}
        return {name: float(limit) for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True)
class QueueRules:
    """`ageing`: seconds of waiting that are worth one step of priority; `turns`: the most jobs that have
    theirs at a time, None for as many as fit; `priority`: the most that a data scientist may state."""

    ageing: float
    turns: int | None = None
    projects: Mapping[str, ProjectTable] = field(default_factory=dict)
    priority: int = 0

    def check(self, wanted: QueueTable, submitter: str, role: str) -> None:
        """ConfigError for a place that a data scientist may not give to a job: others would pay for it.

        A made-up project would have no quota, and a share of its own.
        """
        if role != "data-scientist":
            return
        if wanted.priority > self.priority:
            raise ConfigError(
                f"queue.priority = {wanted.priority} is more than a data scientist may state here, which is "
                f"{self.priority}: ask an operator for `roundtable job move`",
                key=("queue", "priority"),
            )
        if wanted.project in (None, submitter) or not self.projects:
            return
        table = self.projects.get(wanted.project)
        if table is None:
            raise ConfigError(
                f"queue.project = {wanted.project!r} is none of this coordinator's, "
                f"{', '.join(self.projects)}; leave it out, and the job counts for you",
                key=("queue", "project"),
            )
        if table.members is not None and submitter not in table.members:
            raise ConfigError(
                f"queue.project = {wanted.project!r} counts no jobs of {submitter}: ask an operator, or "
                "leave it out, and the job counts for you",
                key=("queue", "project"),
            )

    def weight(self, project: str) -> float:
        """The project's weight; 1 for one that nothing is set for."""
        table = self.projects.get(project)
        return 1.0 if table is None else table.weight

    def places(self) -> dict[Spot, Amounts]:
        """What jobs share beside the silos."""
        found = {Spot("project", name): table.amounts for name, table in self.projects.items()}
        if self.turns is not None:
            found[ALL] = {"jobs": float(self.turns)}
        return {place: amounts for place, amounts in found.items() if amounts}
