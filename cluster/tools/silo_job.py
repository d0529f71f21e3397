"""Loads a job as this silo would run it: the job file, with the tasks, data and devices of agent.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.config import load_agent_config
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.training.batches import count_examples
from roundtable.client.training.loaders import drops_last
from roundtable.client.training.local_training import split_data
from roundtable.client.training.local_work import steps_of
from roundtable.cluster.plan.model_probe import in_words
from roundtable.core.algorithms.round_context import Context
from roundtable.core.config import JobConfig, load_job
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.task import ArrayTask, Site, Task, ToldTask, in_context, load_task


@dataclass(frozen=True)
class SiloJob:
    """A job with its task's code, and the silo's settings for it.

    `options` are the task's `site.options`, `device` is `[limits] device`, and `state` the agent's folder,
    None without an agent.toml.
    """

    job: JobConfig
    task: Task
    table: ClusterTable
    policy: PolicyTable
    options: Mapping[str, Any]
    device: str
    state: Path | None


def load_silo_job(
    agent: Path, job_file: Path, overrides: Mapping[str, Any], reference: str | None = None
) -> SiloJob:
    """Reads both files; `agent` may be absent, and `reference` names the task's code in place of agent.toml.

    Raises ConfigError for mistakes in either file, and for an ArrayTask, which has no module to spread.
    """
    job = load_job(job_file, dict(overrides))
    config = load_agent_config(agent) if agent.exists() else None
    name = reference or (config and config.reference_of(job.task.name)) or job.task.name
    folder = config.folder if config else job_file.resolve().parent
    task = load_task(name, folder, parameters=job.task.parameters)
    if isinstance(task, ArrayTask):
        raise ConfigError(f"task {name!r} is an ArrayTask: only a Task with a PyTorch module runs on ranks")
    return SiloJob(
        job=job,
        task=in_context(task, _context(job)),
        table=(config and config.cluster) or ClusterTable(),
        policy=config.policy if config else PolicyTable(),
        options=dict(config.data if config else job.simulation.data),
        device=config.device if config else "auto",
        state=config.state if config else None,
    )


def open_data(task: Task, name: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The silo's (training, test) data for a site of this name; TaskError with what the task raises."""
    try:
        return split_data(task, Site(name, options=options))
    except RoundtableError:
        raise
    except Exception as error:
        raise TaskError(f"{type(task).__name__}.data() does not run: {in_words(error)}") from error


def tell_steps(task: Task, job: JobConfig, data: Any) -> None:
    """Tells a task that asks how many steps a round over these training data has, as ranks tell it."""
    if isinstance(task, ToldTask):
        steps = steps_of(job, count_examples(data), drop_last=drops_last(data))
        task.tell(_context(job, steps))


def _context(job: JobConfig, steps: int | None = None) -> Context:
    rate = job.algorithm.learning_rate
    return Context(job.title, 1, "plan", steps, job_seed=job.seed, learning_rate=rate)
