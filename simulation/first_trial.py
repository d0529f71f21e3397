"""One batch of one client before round 1, and of two more where that fails: what all share is the task's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundtable.client.batch_tensors import examples_in
from roundtable.client.first_batch.enough_memory import TriedStep, check_room, room_on
from roundtable.client.first_batch.oddities import Oddity, oddities
from roundtable.client.first_batch.step_memory import bytes_of
from roundtable.client.first_batch.trial import Trial, try_batch
from roundtable.client.training.task_composition import check_task_with
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.config import JobConfig, job_document, overridden, read_job
from roundtable.core.errors import ConfigError, NoExamples, TaskError
from roundtable.core.initial_model import initial_model
from roundtable.core.plugins.doors import foreign_trace
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.task import ArrayTask, Site, Task, load_task
from roundtable.core.toml import TomlDocument
from roundtable.simulation.backend import Work, World
from roundtable.simulation.backends.sequential import ROWS_IN_MEMORY
from roundtable.simulation.choose_backend import device_of
from roundtable.simulation.world.partition import SeededPartition, make_partition
from roundtable.simulation.world.tables_check import check_tables


def first_oddities(world: World, partition: SeededPartition, processes: int = 1) -> list[Oddity]:
    """What is odd about the first client that could train, and why those fail that were tried before it;
    `partition` is the job's, and knows its splits; clients train in so many `processes` at once.

    Raises ConfigError as `check_split`, InsufficientMemory where a step has no room, TaskError with its
    traceback where the model, loss or metrics fail at each client that is tried. Data that do not open are
    their client's failure, in its round.
    """
    check_split(world.job, world.task)
    tried: list[Trial] = []
    for index in some_clients(world.job.simulation.clients):
        trial = try_client(world, index, partition, processes)
        if trial.act == "data" and trial.error is not None:
            continue
        if not _fails(world, trial):
            return [*(_failure(each, world.job) for each in tried), *oddities(trial, world.job)]
        tried.append(trial)
    if not tried:
        return []
    first = tried[0]
    assert first.error is not None
    where = f"each of the {len(tried)} clients that were tried" if len(tried) > 1 else first.client
    why = f"{_failure(first, world.job).says}\n{foreign_trace(first.error)}".rstrip()
    raise TaskError(f"{nothing_done(world.job)} fails at {where}. {why}")


def _failure(trial: Trial, job: JobConfig) -> Oddity:
    """Why a client's trial failed, with the client's name."""
    gravest = oddities(trial, job)[0]
    return replace(gravest, says=f"{trial.client}: {gravest.says}")


def nothing_done(job: JobConfig) -> str:
    """How a message begins that no client could do what the job is for; "fails at" follows."""
    sums = job.algorithm.most_added() > 0
    return "nothing was added up: the analysis" if sums else "nothing was trained: the task"


def check_split(job: JobConfig, task: Task | ArrayTask) -> None:
    """Raises ConfigError for a job's partition that this task could not ask for: an app of Flower's."""
    if (own := getattr(task, "splits_by", "")) and job.simulation.splits:
        raise ConfigError(
            f"[simulation] partition: {job.simulation.partition.get('name')!r} would split nothing: a "
            f"Flower app splits its data itself, by {own}: leave partition out, or let the app split so"
        )


def try_client(world: World, index: int, partition: SeededPartition, processes: int = 1) -> Trial:
    """One batch of client `index`, where clients train."""
    clients = world.job.simulation.clients
    beside = site_of(world, (index + 1) % clients, partition) if clients > 1 else None
    device = torch.device(device_of(world))
    enough = partial(_enough, world, processes)
    return try_batch(world.task, world.job, site_of(world, index, partition), device, beside, enough)


def _enough(world: World, processes: int, task: Task, module: nn.Module, batch: Any, context: Context) -> str:
    """That memory hardly suffices; "" where it does. InsufficientMemory where it does not."""
    job, sizes = world.job, bytes_of(module)
    if isinstance(job.privacy, ExampleLevel):
        return ""  # DP-SGD takes parts of a batch as they fit.
    here = context.device.type == "cpu"
    work = world.local_work(1, world.initial.vector, Work(context.site, world.names.index_of(context.site)))
    rows = 4 * world.layout.sent.size * (job.cohort.size or job.simulation.clients)
    step = TriedStep(
        task=task,
        work=work,
        module=module,
        context=context,
        batch=batch,
        examples=examples_in(batch),
        # The backend has a model of its own beside the one that is tried.
        held=2 * sizes if here else 0,
        beside=rows if here and rows <= ROWS_IN_MEMORY else 0,
        processes=processes,
        cluster=False,
    )
    return check_room(step, room_on(context.device))


def site_of(world: World, index: int, partition: SeededPartition) -> Site:
    """What the task is told of client `index`."""
    simulation, name = world.job.simulation, world.names[index]
    return Site(name, index, simulation.clients, simulation.data, partition, world.job.standardise)


def some_clients(clients: int) -> list[int]:
    """The first, the last and one in between: what they share is hardly their data."""
    return sorted({0, clients // 2, clients - 1})


def _fails(world: World, trial: Trial) -> bool:
    """Whether a round of this client could give nothing; metrics that nobody asks for may do as they like."""
    if trial.error is None or isinstance(trial.error, NoExamples):
        return False
    evaluation = world.job.evaluation
    return trial.act != "metrics" or bool(evaluation.every or evaluation.bounds)


def try_task(
    reference: str, file: Path | None, overrides: Mapping[str, Any], index: int
) -> tuple[JobConfig, Trial, list[Oddity]]:
    """One batch of the task that `reference` names, with a job file's settings or their defaults.

    Raises ConfigError or TaskError for a job or a task that cannot be read, or that has no such client.
    """
    document = TomlDocument({}, "job", "") if file is None else job_document(file)
    folder = Path.cwd() if file is None else file.resolve().parent
    given = document.values.get("task")
    document.values["task"] = {**(given if isinstance(given, dict) else {}), "name": reference}
    job = read_job(overridden(document, overrides), folder)
    clients = job.simulation.clients
    if index >= clients:
        raise ConfigError(
            f"--client {index}: simulation.clients = {clients}, so the last one is {clients - 1}"
        )
    check_tables(job, folder)
    task = load_task(reference, Path.cwd(), parameters=job.task.parameters)
    check_split(job, task)
    algorithm = make_algorithm(job.algorithm, folder)
    world = World(job, task, initial_model(job, task, algorithm), None, folder)
    check_task_with(job, algorithm, task, world.layout)
    trial = try_client(world, index, make_partition(job.simulation.partition, job.seed, folder))
    return job, trial, oddities(trial, job)
