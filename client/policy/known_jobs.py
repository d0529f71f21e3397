"""The jobs that this silo was asked to take part in, and what a person said to each.

    jobs/known/JOB.json       what the agent was asked: written by the agent
    jobs/approved/JOB.json    what a person allowed: written by `roundtable client approve`

An approval is of one configuration, by its digest: a job that changes needs another one.
"""

from __future__ import annotations

import getpass
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundtable.client.durable_files import replace_synced
from roundtable.core.errors import ConfigError, ResourceError

_KEPT = 1000


@dataclass(frozen=True)
class KnownJob:
    """A job as it was first asked for. `submitter` is empty where no signature proves it."""

    id: str
    digest: str
    config: str
    task: str
    submitter: str
    request: str
    initial_model: str
    first: float


class KnownJobs:
    """Both folders, below the agent's state folder."""

    def __init__(self, state: Path) -> None:
        self._known = state / "jobs" / "known"
        self._approved = state / "jobs" / "approved"
        self._jobs: dict[str, KnownJob] = {}

    def get(self, job: str) -> KnownJob | None:
        """The job as the agent knows it."""
        path = self._known / f"{job}.json"
        if job not in self._jobs and (known := _read(path)) is not None:
            try:
                self._jobs[job] = KnownJob(**known)
            except TypeError as error:
                raise ResourceError(f"{path} is none of this version: {error}; delete it") from error
        return self._jobs.get(job)

    def remember(self, job: KnownJob) -> None:
        """Durable when this returns."""
        self._known.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_synced(self._known / f"{job.id}.json", [json.dumps(asdict(job)).encode()])
        self._jobs[job.id] = job

    def of_request(self, request: str) -> KnownJob | None:
        """The job that was made of this submission."""
        return next((job for job in self.all() if request and job.request == request), None)

    def all(self) -> list[KnownJob]:
        """Every job, the newest first."""
        names = [path.stem for path in self._known.glob("*.json")]
        jobs = [job for name in names if (job := self.get(name)) is not None]
        return sorted(jobs, key=lambda job: -job.first)[:_KEPT]

    def find(self, wanted: str) -> KnownJob:
        """By its identifier or a unique prefix; ConfigError for a job that the agent was never asked for."""
        matching = [job for job in self.all() if job.id.startswith(wanted)]
        if len(matching) != 1:
            reason = (
                "several jobs begin so" if matching else "the coordinator has not asked for such a job yet"
            )
            raise ConfigError(f"{wanted!r}: {reason}; `roundtable client jobs` lists them")
        return matching[0]

    def approve(self, job: KnownJob) -> None:
        """Allows a job as it is known here."""
        self._approved.mkdir(parents=True, exist_ok=True, mode=0o700)
        said_by = {"digest": job.digest, "by": getpass.getuser(), "time": time.time()}
        replace_synced(self._approved / f"{job.id}.json", [json.dumps(said_by).encode()])

    def approval(self, job: KnownJob) -> dict[str, Any] | None:
        """Who allowed exactly this configuration, and when; None if nobody has."""
        approved = _read(self._approved / f"{job.id}.json")
        return approved if approved is not None and approved.get("digest") == job.digest else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ResourceError(f"{path} cannot be read: {error}; restore it or delete it") from error
    return values if isinstance(values, dict) else None
