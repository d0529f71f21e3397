"""Whether a silo's memory suffices for a training step: with which rank, with the batch whole or in parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.durable_files import replace_synced
from roundtable.client.first_batch.enough_memory import Room, TriedStep, check_room
from roundtable.client.first_batch.fitting_rank import fitting_rank
from roundtable.client.first_batch.step_memory import bytes_of
from roundtable.client.first_batch.trial import first_examples
from roundtable.client.training.batches import count_examples
from roundtable.client.training.local_work import LocalWork
from roundtable.client.training.micro_batches import CannotSplit, check_layers
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import AnyTask, Task

MOST_HALVINGS = 6
_log = logging.getLogger("roundtable.worker")


def part_of_batch(job: JobConfig, halvings: int, *, evaluation: bool = False) -> int:
    """The most examples in memory at once, after so many halvings."""
    whole = job.evaluation_batch if evaluation else job.algorithm.batch_size
    return max(1, whole >> halvings)


def check_step(
    task: AnyTask,
    model: nn.Module | dict[str, Tensor],
    data: Any,
    work: LocalWork,
    device: torch.device,
    room: Room | None,
    halvings: int,
) -> None:
    """Raises InsufficientMemory where a step with so many halvings of its batch has no room, with how many it
    would have; logs that memory is tight."""
    job = work.job
    step = tried_step(task, model, data, work, device, halvings)
    if step is None:
        return
    halved = [part_of_batch(job, number) for number in range(1, MOST_HALVINGS + 1)]
    if says := check_room(step, room, halved if _in_parts(step.module) else ()):
        _log.warning("%s: %s", job.title, says)


def settled_rank(step: TriedStep | None, choices: Sequence[int], room: Room | None, file: Path) -> int:
    """The rank of the silo's factors, where the job leaves it to the silo's memory: of `choices`, which fall.

    Kept in a file for the job. Once the agent has begun anew, it falls where memory does not hold it any
    more, and never rises.
    """
    kept = None
    with suppress(FileNotFoundError, ValueError):
        kept = int(file.read_text(encoding="ascii"))
    rank, why = fitting_rank(step, choices, room, kept)
    if rank != kept:
        before = f", before {kept}" if kept in choices else ""
        _log.warning("the rank of this silo's factors is %d, of %s%s: %s", rank, choices[::-1], before, why)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(file, [str(rank).encode()])
    return rank


def tried_step(
    task: AnyTask,
    model: nn.Module | dict[str, Tensor],
    data: Any,
    work: LocalWork,
    device: torch.device,
    halvings: int = 0,
) -> TriedStep | None:
    """A step with so many halvings of its batch; None where there is none that could be counted."""
    job = work.job
    if not isinstance(task, Task) or not isinstance(model, nn.Module) or work.rules().answers:
        return None
    private = isinstance(job.privacy, ExampleLevel)
    asked = part_of_batch(job, halvings)
    try:
        with isolated_randomness(0, torch.device("cpu")):
            # A stream is read once. DP-SGD takes parts of a batch as they fit.
            count = count_examples(data)
            examples = 1 if private else min(asked, count or asked)
            batch = None if count is None else first_examples(data, examples)
    except Exception as error:  # noqa: BLE001 - training says what is wrong with the data
        _log.debug("the memory of a training step is not known beforehand: %s", error)
        return None
    return TriedStep(
        task=task,
        work=work,
        module=model,
        context=work.context(data, device),
        batch=batch,
        examples=examples,
        held=bytes_of(model) if next(model.parameters()).device.type == device.type else 0,
        beside=4 * work.layout.sent.size if device.type == "cpu" else 0,
    )


def _in_parts(model: nn.Module) -> bool:
    """Whether its batches may be parted, as far as layers tell."""
    try:
        check_layers(model)
    except CannotSplit:
        return False
    return True
