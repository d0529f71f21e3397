"""Tries a task as rounds would: its code, its model, its data, a batch of training and one of evaluation.

For the doctor and the agent's start, in a process of its own that does nothing else. Nothing of it is kept or
sent: no update, no loss, no metric, no count of examples, no place in a stream; no privacy is paid for,
because nothing leaves that would have to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from roundtable.client.analysis_task import AnalysisTask
from roundtable.client.training.evaluation import evaluate
from roundtable.client.training.local_training import split_data, train
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.client.training.silo_account import Protection
from roundtable.client.training.task_composition import check_task_with
from roundtable.client.worker.executor import Settings
from roundtable.client.worker.step_room import part_of_batch
from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import TaskError
from roundtable.core.initial_model import initial_vector, job_layout
from roundtable.core.machine.process_facts import peak_memory
from roundtable.core.plugins.calls import LackingParameters
from roundtable.core.privacy_table import NoPrivacy
from roundtable.core.task import Site, initial_state, load_task

ACTS = (
    "import its code",
    "make its model",
    "open its data",
    "train on one batch",
    "evaluate one batch",
)
"""What is tried, in this order."""
BATCHES = ACTS[3:]
"""Those that work on batches."""


@dataclass(frozen=True)
class Rehearsed:
    """What the machine must hold: values of the vector that travels, bytes that the process held at most.

    `lacking` are the task's parameters without a default that the job does not say: then nothing was tried.
    """

    values: int
    batch_size: int
    evaluated: bool
    memory: int
    gpu_memory: int
    lacking: tuple[str, ...] = ()


def one_step(job: JobConfig) -> JobConfig:
    """The job as far as one batch tells: with a round of a single step."""
    algorithm = job.algorithm.model_copy(update={"steps": 1, "epochs": None})
    return job.model_copy(update={"algorithm": algorithm, "rounds": 1})


def rehearse(
    settings: Settings, order: Order, device: torch.device, begins: Callable[[int], None]
) -> Rehearsed:
    """Does all of ACTS; `begins` hears the number of each before it is done. Raises what the task raises."""
    begins(0)
    job = one_step(job_from_json(order.config))
    try:
        task = load_task(order.task, Path(settings.folder), parameters=job.task.parameters)
    except LackingParameters as error:
        return Rehearsed(0, job.algorithm.batch_size, False, peak_memory() or 0, 0, error.names)
    begins(1)
    made = initial_state(task, job.seed)
    algorithm = make_algorithm(job.algorithm)
    layout = job_layout(job, algorithm, made)
    if algorithm.answers or not isinstance(task, AnalysisTask):
        # Where no analysis is known yet, its task is tried by reading the tables.
        check_task_with(job, algorithm, task, layout)
    if layout.size == 0:
        raise TaskError(f"no tensor of {type(task).__name__}'s model travels")
    vector = initial_vector(layout, made)
    begins(2)
    options = settings.data_of.get(order.task, settings.data)
    training, test = split_data(task, Site(settings.client, options=options, standardise=job.standardise))
    begins(3)
    work = LocalWork(job, layout, vector, 1, settings.client, None, algorithm)
    free = Protection(lambda privacy, charge: None)
    out = torch.empty(layout.sent.size)
    train(task, made, training, work, Execution(device=device, protection=free, out=out))
    evaluates = isinstance(job.privacy, NoPrivacy) or job.privacy.public_evaluation
    if evaluates:
        begins(4)
        evaluate(
            task,
            made,
            test,
            layout,
            vector,
            device=device,
            context=work.evaluation_context(device),
            batch_size=part_of_batch(job, 0, evaluation=True),
            batches=1,
        )
    return Rehearsed(layout.size, job.algorithm.batch_size, evaluates, peak_memory() or 0, _held_of(device))


def _held_of(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
