"""A silo's own trackers, `[cluster.tracking]`: each step of its cluster, below the agent's state folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from roundtable.client.trainer import Figures, ProgressListener, StepWork
from roundtable.core.config import TrackingTable
from roundtable.core.observability.tracking import (
    BackgroundTrackers,
    TrackedRun,
    check_inside,
    check_trackers,
)
from roundtable.core.observability.training_setup import TrainingSetup

_log = logging.getLogger("roundtable.agent")
_KEY, _WHOSE = "cluster.tracking", "an agent"
_WAITING = 1000


class StepTracking:
    """A run for each job, whose steps are counted over its rounds: those of round r begin at (r − 1) × steps.

    A step that is taken again, as where a round goes on from a checkpoint, is there once.
    """

    def __init__(self, table: TrackingTable, state: Path) -> None:
        self._table = table
        self._folder = state / "tracking"
        self._jobs: dict[str, BackgroundTrackers] = {}

    def check(self) -> None:
        """Raises ConfigError for a place outside the folder, ResourceError for a tool that is not there."""
        check_inside(self._table, _KEY, _WHOSE)
        check_trackers(self._table, _KEY)

    def heard(
        self, work: StepWork, progress: ProgressListener, plan: Callable[[], TrainingSetup | None]
    ) -> ProgressListener:
        """Who hears of each step of `work` before `progress` does, and of the plan with the first one."""
        told = False

        def seen(done: int, total: int, loss: float, figures: Figures | None = None) -> None:
            # With its first step the group has its plan.
            nonlocal told
            if not told and (setup := plan()) is not None:
                work.set_up(setup)
            told = True
            if figures is not None:
                self._note(work, loss, figures)
            progress(done, total, loss, figures)

        return seen

    def _note(self, work: StepWork, loss: float, figures: Figures) -> None:
        if not self._table.model_dump(exclude_none=True):
            return
        job = work.step.job
        if job not in self._jobs:
            self._jobs[job] = self._begin(work)
        told = dict(figures)
        number = (work.step.round - 1) * int(told.pop("steps")) + int(told.pop("step"))
        if math.isfinite(loss):
            told["loss"] = loss
        self._jobs[job].log(number, told)

    def close(self, job: str | None = None) -> None:
        """A job is over, or the agent ends and all of them are broken off."""
        for name in [job] if job is not None else list(self._jobs):
            if (trackers := self._jobs.pop(name, None)) is not None:
                trackers.close(job is not None)

    def _begin(self, work: StepWork) -> BackgroundTrackers:
        job, title = work.step.job, work.job.title.replace("/", ".")
        settings = {"job": job, "task": work.job.task.name, "silo": work.client}
        run = TrackedRun(title, f"{title}-{job}", job, settings, always="seconds")
        return BackgroundTrackers(
            self._table,
            self._folder,
            run,
            lambda said: _log.warning("cluster: %s", said),
            _KEY,
            most=_WAITING,
        )
