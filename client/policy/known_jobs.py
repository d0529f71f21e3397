"""Keeps the jobs that this silo was asked to take part in, and a person's decision on each.

    jobs/known/JOB.json       what the agent took part in: never forgotten
    jobs/asked/JOB.json       what it was asked for and did not do (yet): the newest 200
    jobs/approved/JOB.json    what a person allowed: written by `roundtable client approve`
    jobs/refused/JOB.json     what a person refused: written by `roundtable client refuse`

What the agent did not do has a place of its own, so that no number of such jobs pushes out one that ran. An
approval is of one configuration, by its digest: a job that changes needs another one. A refusal is of the
job, whatever its configuration becomes, and holds until somebody approves it.
"""

from __future__ import annotations

import getpass
import json
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from roundtable.client.durable_files import replace_synced
from roundtable.core.bounds import is_word
from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import ConfigError, IdentityError, ResourceError

_ASKED = 200
_READ = 64
MOST_REASON = 200


@lru_cache(maxsize=_READ)
def job_read(config: str) -> JobConfig:
    """`job_from_json` of a job's configuration, which every step of the job brings again."""
    return job_from_json(config)


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


@dataclass(frozen=True)
class Decision:
    """What a person here has said to a job: who (an account of this machine), and when (Unix time)."""

    approved: bool
    by: str
    time: float
    reason: str = ""


class KnownJobs:
    """The four folders, below the agent's state folder."""

    def __init__(self, state: Path) -> None:
        folder = state / "jobs"
        self._known = folder / "known"
        self._asked = folder / "asked"
        self._approved = folder / "approved"
        self._refused = folder / "refused"
        self._jobs: dict[str, KnownJob] = {}

    def get(self, job: str) -> KnownJob | None:
        """The job as the agent first took part in it; IdentityError for what cannot name a job."""
        if job not in self._jobs and (known := _job(_place(self._known, job))) is not None:
            self._jobs[job] = known
        return self._jobs.get(job)

    def ask(self, job: KnownJob) -> None:
        """Keeps a job that is not done, or not yet, for a person to look at. The oldest of 200 gives way."""
        path = _place(self._asked, job.id)
        known = _job(path)
        if known is not None and known.digest == job.digest:
            return
        self._asked.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_synced(path, [json.dumps(asdict(job)).encode()])
        files = sorted(self._asked.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-_ASKED]:
            file.unlink(missing_ok=True)

    def remember(self, job: KnownJob) -> None:
        """This is what the agent takes part in; durable when this returns."""
        path = _place(self._known, job.id)
        self._known.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_synced(path, [json.dumps(asdict(job)).encode()])
        self._jobs[job.id] = job
        _place(self._asked, job.id).unlink(missing_ok=True)

    def all(self) -> list[KnownJob]:
        """Every job, the newest first."""
        files = [*self._known.glob("*.json"), *self._asked.glob("*.json")]
        jobs = {job.id: job for file in reversed(files) if (job := _job(file)) is not None}
        return sorted(jobs.values(), key=lambda job: -job.first)

    def taken_part(self) -> list[KnownJob]:
        """Every job that the agent took part in; none is ever forgotten."""
        return [job for file in sorted(self._known.glob("*.json")) if (job := _job(file)) is not None]

    def find(self, wanted: str) -> KnownJob:
        """Finds a job by identifier or unique prefix; ConfigError for one the agent was never asked for."""
        matching = [job for job in self.all() if job.id.startswith(wanted)]
        if len(matching) != 1:
            reason = (
                "several jobs begin so" if matching else "the coordinator has not asked for such a job yet"
            )
            raise ConfigError(f"{wanted!r}: {reason}; `roundtable client jobs` lists them")
        return matching[0]

    def approve(self, job: KnownJob) -> None:
        """Approves the job with this configuration; a refusal is over."""
        said_by = {"digest": job.digest, "by": getpass.getuser(), "time": time.time()}
        self._write(self._approved, job.id, said_by)
        _place(self._refused, job.id).unlink(missing_ok=True)

    def refuse(self, job: KnownJob, reason: str = "") -> None:
        """Takes no further part in the job; an approval is over.

        ConfigError for a reason that is too long or not printable: the coordinator's operators are shown it.
        """
        if len(reason) > MOST_REASON or not reason.isprintable():
            raise ConfigError(f"the reason: at most {MOST_REASON} printable characters, on one line")
        said_by = {"by": getpass.getuser(), "time": time.time(), "reason": reason}
        self._write(self._refused, job.id, said_by)
        _place(self._approved, job.id).unlink(missing_ok=True)

    def decision(self, job: KnownJob) -> Decision | None:
        """What a person has said to exactly this configuration; None where nobody has said anything."""
        # Asked in this order a refusal is never missed: the approval that replaces it is written first.
        approved, refused = _read(_place(self._approved, job.id)), _read(_place(self._refused, job.id))
        if refused is not None:
            return Decision(False, *_said_by(refused), str(refused.get("reason", "")))
        if approved is not None and approved.get("digest") == job.digest:
            return Decision(True, *_said_by(approved))
        return None

    def is_approved(self, job: KnownJob) -> bool:
        """Whether a person has allowed exactly this configuration, and has not refused the job since."""
        decision = self.decision(job)
        return decision is not None and decision.approved

    def _write(self, folder: Path, job: str, values: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_synced(_place(folder, job), [json.dumps(values).encode()])


def _said_by(values: dict[str, Any]) -> tuple[str, float]:
    return str(values.get("by", "")), float(values.get("time", 0.0))


def _place(folder: Path, job: str) -> Path:
    """The file of a job whose identifier the coordinator has sent."""
    if not is_word(job):
        raise IdentityError(f"{job[:80]!r} names no job: letters, digits and the signs _.:- do")
    return folder / f"{job}.json"


def _job(path: Path) -> KnownJob | None:
    values = _read(path)
    try:
        return KnownJob(**values) if values is not None else None
    except TypeError as error:
        raise ResourceError(
            f"{path} was written by another version and cannot be read ({error}); delete it, "
            "and the job is unknown until the coordinator asks again"
        ) from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ResourceError(f"{path} cannot be read: {error}; restore it or delete it") from error
    return values if isinstance(values, dict) else None
