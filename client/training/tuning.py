"""Steps on a model before it is evaluated at a client: on its training data, and of no effect on what is
sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundtable.client.training.batches import asking, count_examples, ordering_of, training_batches
from roundtable.client.training.local_work import BeforeBatch, LocalWork
from roundtable.client.training.sgd import SGD
from roundtable.core.errors import TaskError
from roundtable.core.seeds import torch_generator
from roundtable.core.task import AnyTask, in_context


def tuner(
    task: AnyTask,
    data: Any,
    work: LocalWork,
    device: torch.device,
    before_batch: BeforeBatch | None = None,
) -> Callable[[nn.Module, int, float], None]:
    """`ClientRound.tune`: steps of plain SGD with the job's batch size, in an order of its own each round.

    Raises TaskError, once it is asked for steps, where the data are a stream.
    """

    def tune(module: nn.Module, steps: int, rate: float) -> None:
        if count_examples(data) is None:
            raise TaskError(
                f"algorithm {work.job.algorithm.name!r} tunes the model on the training data before it is "
                f"evaluated, and the {type(data).__name__} of data() has no length: give a data set with a "
                "length, or an algorithm that does not tune"
            )
        told = in_context(task, work.evaluation_context(device))
        order = ordering_of(work.job, work.round, work.client)
        order["steps"] = steps
        order["generator"] = torch_generator(work.job.seed, work.round, work.client, "tuning")
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = SGD(parameters, rate, 0.0, 0.0)
        module.train()
        for batch in asking(training_batches(data, **order, device=device), before_batch):
            optimizer.zero_grad()
            told.loss(module, batch.data).backward()
            optimizer.step()
        optimizer.zero_grad()

    return tune
