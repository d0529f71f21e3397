"""Whether a silo's memory suffices for a training step, with the batch whole or in parts."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.first_batch.enough_memory import Room, TriedStep, check_room
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
    if not isinstance(task, Task) or not isinstance(model, nn.Module) or work.rules().answers:
        return
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
        return
    step = TriedStep(
        task=task,
        work=work,
        module=model,
        context=work.context(data, device),
        batch=batch,
        examples=examples,
        held=bytes_of(model) if next(model.parameters()).device.type == device.type else 0,
        beside=4 * work.layout.sent.size if device.type == "cpu" else 0,
    )
    halved = [part_of_batch(job, number) for number in range(1, MOST_HALVINGS + 1)]
    if says := check_room(step, room, halved if _in_parts(model) else ()):
        _log.warning("%s: %s", job.title, says)


def _in_parts(model: nn.Module) -> bool:
    """Whether its batches may be parted, as far as layers tell."""
    try:
        check_layers(model)
    except CannotSplit:
        return False
    return True
