"""Training on data of the coordinator's own, for rules that measure updates by it (FLTrust)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.layout import Layout


class TrustedTraining(Protocol):
    """Training on data of the coordinator's own: whoever starts the service brings it."""

    def offers(self, task: JobTaskTable) -> bool:
        """Whether there are trusted data for a job's task, with the parameters that it sets."""

    def update(self, job: JobConfig, layout: Layout, vector: Tensor, round: int) -> Tensor:
        """local − global after a round of training from `vector`: float32 [layout.size].

        Raises AggregationError where the task fails.
        """


class NoTrustedTraining:
    """Of a coordinator without data of its own."""

    def offers(self, task: JobTaskTable) -> bool:
        return False

    def update(self, job: JobConfig, layout: Layout, vector: Tensor, round: int) -> Tensor:
        raise AggregationError(f"this coordinator has no trusted data for the task {job.task.name!r}")
