"""A job's `[tracking]` at the coordinator: figures go out as rounds are committed, beside everything else."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from roundtable.core.config import JobConfig
from roundtable.core.observability.tracking import BackgroundTrackers, TrackedRun
from roundtable.engine.messages import RoundRecord
from roundtable.server.operations.publication import Publication

log = logging.getLogger("roundtable.server.jobs.job_tracking")


class JobTracking:
    """One job's trackers.

    What was committed while they did not listen, before a crash, they are told when the job is taken up.
    """

    def __init__(self, job: str, config: JobConfig, folder: Path, history: Sequence[RoundRecord]) -> None:
        self._config = config
        self._began = history[0].started if history else None
        self._trackers: BackgroundTrackers | None = None
        if config.tracking.model_dump(exclude_none=True):
            settings = {"job": job, "task": config.task.name, "rounds": config.rounds}
            title = config.title.replace("/", ".")
            run = TrackedRun(title, f"{title}-{job}", job, settings)

            def complain(said: str) -> None:
                log.warning("%s", said, extra={"job": job})

            self._trackers = BackgroundTrackers(config.tracking, folder, run, complain)
            for record in history:
                self.committed(record)

    def committed(
        self, record: RoundRecord, steps: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    ) -> None:
        """Logs a round that is durable, with the `steps` of silos' clusters in figures. Returns at once."""
        if self._trackers is not None:
            self._began = record.started if self._began is None else self._began
            passed = {"time": record.ended - self._began, "seconds": record.ended - record.started}
            door = Publication(self._config.privacy)
            values = {**door.figures(record).value, **door.steps(steps).value, **passed}
            self._trackers.log(record.round, values)

    def close(self, finished: bool) -> None:
        """Ends tracking. Returns at once; what was logged before is still written."""
        if self._trackers is not None:
            self._trackers.close(finished)
            self._trackers = None
