"""Each task that a silo offers, tried before a round asks for it: at the agent's start, and by the doctor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roundtable.client.failures import WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.known_jobs import KnownJobs
from roundtable.client.trainer import Figures, Trainer
from roundtable.client.worker.rehearsal import ACTS, Rehearsed
from roundtable.client.worker.worker_order import Order
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import ConfigError, RoundtableError

_log = logging.getLogger("roundtable.agent")


@dataclass(frozen=True)
class Rehearsal:
    """What came of a task: `found` where it passed, `failure` where it failed at `act`, neither where a step
    of a round came first, or where the task wants parameters that no known job says: `lacking`.
    """

    act: str
    found: Rehearsed | None = None
    failure: WorkFailed | None = None
    lacking: tuple[str, ...] = ()

    @property
    def wants(self) -> str:
        """What a task waits for that could not be tried; empty for any other."""
        if not self.lacking:
            return ""
        values = ", ".join(self.lacking)
        return (
            f"it needs a job's `[task]` values ({values}), and no job that ran here or was approved says them"
        )


def jobs_to_rehearse(config: AgentConfig) -> dict[str, JobConfig]:
    """What each task is tried with: the newest job that ran here or was approved, or the defaults.

    Raises ResourceError where the agent's own files cannot be read.
    """
    jobs = KnownJobs(config.state)
    ran = {job.id for job in jobs.taken_part()}
    chosen: dict[str, JobConfig] = {}
    for known in jobs.all():
        if known.id not in ran and not jobs.is_approved(known):
            continue
        reference = config.reference_of(known.task)
        for name in (name for name, own in config.tasks.items() if own == reference and name not in chosen):
            try:
                job = job_from_json(known.config)
                if not any(config.rules().to_task(job)):
                    chosen[name] = job
            except ConfigError as error:
                # Of another version, as a rule: an older job's, or the defaults, tell nearly as much.
                _log.info("task %s is not tried as job %s asks: %s", name, known.id, error)
    return {name: chosen.get(name) or _defaults(name) for name in config.tasks}


def _defaults(task: str) -> JobConfig:
    return JobConfig.model_validate({"task": task})


async def rehearse_task(config: AgentConfig, trainer: WorkerTrainer, name: str, job: JobConfig) -> Rehearsal:
    """Tries one task for at most `[limits] rehearsal`; what it raises is told in the answer."""
    act = ACTS[0]

    def begins(done: int, total: int, loss: float = math.nan, figures: Figures | None = None) -> None:
        nonlocal act
        act = ACTS[done]
        _log.info("task %s: trying to %s", name, act)

    for reason in config.rules().to_task(job):
        # Code that the silo has not allowed runs for no job, and not here.
        return Rehearsal(act, failure=WorkFailed("refused", reason))
    order = Order("rehearsal", 1, "train", job.to_json(), config.tasks[name], "", "", "")
    try:
        async with asyncio.timeout(config.rehearsal):
            found = await trainer.rehearse(order, begins)
    except TimeoutError:
        late = f"it was not done after {config.rehearsal:g} s; [limits] rehearsal gives more"
        return Rehearsal(act, failure=WorkFailed("node_failure", late))
    except WorkFailed as failure:
        return Rehearsal(act, failure=failure)
    if found is None or not found.lacking:
        return Rehearsal(act, found)
    if job == _defaults(name):
        return Rehearsal(act, lacking=tuple(found.lacking))
    said = f"its job says no {', '.join(found.lacking)} in `[task]`"
    return Rehearsal(act, failure=WorkFailed("task_error", said))


@asynccontextmanager
async def rehearsing(
    config: AgentConfig, trainer: Trainer, passed: MutableMapping[str, bool]
) -> AsyncIterator[None]:
    """Tries all tasks while the block goes on, beside it; rounds go first. Nothing is sent of it.

    `passed` gets whether each task did.
    """
    if config.rehearsal == 0 or not isinstance(trainer, WorkerTrainer):
        yield
        return
    rehearsals = asyncio.create_task(_all(config, trainer, passed))
    try:
        yield
    finally:
        rehearsals.cancel()
        await asyncio.gather(rehearsals, return_exceptions=True)


async def _all(config: AgentConfig, trainer: WorkerTrainer, passed: MutableMapping[str, bool]) -> None:
    try:
        for name, job in jobs_to_rehearse(config).items():
            _tell(name, await rehearse_task(config, trainer, name, job), passed)
    except (RoundtableError, OSError) as error:
        _log.error("the tasks cannot be tried: %s", error)


def _tell(name: str, rehearsal: Rehearsal, passed: MutableMapping[str, bool]) -> None:
    failure = rehearsal.failure
    if failure is not None:
        passed[name] = False
        trace = f"\n{failure.trace}" if failure.trace else ""
        _log.error(
            "task %s would fail: it cannot %s: %s. It stays offered; `roundtable client doctor` tries it "
            "again%s",
            name,
            rehearsal.act,
            failure.detail,
            trace,
        )
    elif rehearsal.lacking:
        _log.info("task %s is not tried: %s", name, rehearsal.wants)
    elif rehearsal.found is None:
        _log.info("task %s is not tried: a round came first", name)
    else:
        passed[name] = True
        _log.info("task %s was tried and is ready", name)
