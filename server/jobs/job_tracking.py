"""A job's `[tracking]` at the coordinator: figures go out as rounds are committed, beside everything else."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from roundtable.core.config import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.observability.tracking import TrackedRun, Trackers
from roundtable.engine.messages import RoundRecord
from roundtable.server.operations.publication import Publication

log = logging.getLogger("roundtable.server.jobs.job_tracking")


class JobTracking:
    """One job's trackers, in a thread of their own: a slow disk or server holds up no round.

    What was committed while they did not listen, before a crash, they are told when the job is taken up.
    """

    def __init__(self, job: str, config: JobConfig, folder: Path, history: Sequence[RoundRecord]) -> None:
        self._job = job
        self._config = config
        self._folder = folder
        self._began = history[0].started if history else None
        self._thread: ThreadPoolExecutor | None = None
        self._trackers: Trackers | None = None
        if config.tracking.model_dump(exclude_none=True):
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tracking-{job}")
            self._thread.submit(self._begin)
            for record in history:
                self.committed(record)

    def committed(
        self, record: RoundRecord, steps: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    ) -> None:
        """Logs a round that is durable, with the `steps` of silos' clusters in figures. Returns at once."""
        if self._thread is not None:
            self._began = record.started if self._began is None else self._began
            passed = {"time": record.ended - self._began, "seconds": record.ended - record.started}
            door = Publication(self._config.privacy)
            values = {**door.figures(record).value, **door.steps(steps).value, **passed}
            self._thread.submit(self._log, record.round, values)

    def close(self, finished: bool) -> None:
        """Ends tracking. Returns at once; what was logged before is still written."""
        if self._thread is not None:
            self._thread.submit(self._close, finished)
            self._thread.shutdown(wait=False)
            self._thread = None

    def _begin(self) -> None:
        settings = {"job": self._job, "task": self._config.task.name, "rounds": self._config.rounds}
        title = self._config.title.replace("/", ".")
        run = TrackedRun(title, f"{title}-{self._job}", self._job, settings)
        try:
            self._trackers = Trackers(self._config.tracking, self._folder, run, self._complain)
        except RoundtableError as error:
            self._complain(str(error))

    def _log(self, round: int, values: dict[str, float]) -> None:
        if self._trackers is not None:
            self._trackers.log(round, values)

    def _close(self, finished: bool) -> None:
        if self._trackers is not None:
            self._trackers.close(finished)

    def _complain(self, said: str) -> None:
        log.warning("%s", said, extra={"job": self._job})
