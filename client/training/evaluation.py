"""Evaluation of a model on test data, for silos and for simulated clients alike.

As training does, it puts everything back as it was found: the module's tensors outside the vector, and
every global random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundtable.client.training.arrays import arrays_of
from roundtable.client.training.batches import Batch, asking, ordered_batches
from roundtable.client.training.local_training import local_of, module_of
from roundtable.client.training.local_work import BeforeBatch
from roundtable.client.training.metrics import Counts, Metrics, add, checked
from roundtable.client.training.module_state import borrowed
from roundtable.core.algorithms.round_context import Context
from roundtable.core.layout import Layout
from roundtable.core.seeds import derive_seed, isolated_randomness, seed_all
from roundtable.core.task import AnyTask, ArrayTask, in_context

EVALUATION_SEED = derive_seed(0, "evaluation")

Prepare = Callable[[nn.Module], None]


def seed_batch(batch: Batch, device: torch.device) -> None:
    """What a model draws while it is measured follows from the batch, whoever measures which of them."""
    seed_all(derive_seed(EVALUATION_SEED, "batch", batch.place), device)


class Measure(Protocol):
    """Measures the model that is in place."""

    def __call__(self, data: Any, ready: Iterable[Batch] | None = None) -> Metrics:
        """Gives (sum, count) by name over a client's test data, whose batches may be `ready`."""


def evaluate(
    task: AnyTask,
    model: nn.Module | Mapping[str, Tensor],
    data: Any,
    layout: Layout,
    vector: Tensor,
    *,
    device: str | torch.device = "cpu",
    local: Mapping[str, Tensor] | None = None,
    batch_size: int = 256,
    prepare: Prepare | None = None,
    context: Context | None = None,
    batches: int | None = None,
    before_batch: BeforeBatch | None = None,
) -> Metrics:
    """Named (sum, count) of the model `vector` over the client's test data, "loss" among them.

    No gradients, evaluation mode. Empty where there is no test data. For an ArrayTask it is what
    the task's own `evaluate` says. `batches`: over the first so many of them. `before_batch` may raise.
    """
    with evaluation(
        task,
        model,
        layout,
        vector,
        device=device,
        local=local,
        batch_size=batch_size,
        prepare=prepare,
        context=context,
        batches=batches,
        before_batch=before_batch,
    ) as measure:
        return measure(data)


@contextmanager
def evaluation(
    task: AnyTask,
    model: nn.Module | Mapping[str, Tensor],
    layout: Layout,
    vector: Tensor,
    *,
    device: str | torch.device = "cpu",
    local: Mapping[str, Tensor] | None = None,
    batch_size: int = 256,
    prepare: Prepare | None = None,
    context: Context | None = None,
    batches: int | None = None,
    before_batch: BeforeBatch | None = None,
) -> Iterator[Measure]:
    """`evaluate` for one data set after the other: the model is put in place once for all of them, and each
    draws alike. A task must not change the model meanwhile; `prepare` may, once, before: an
    algorithm with personal models."""
    layout = layout.model
    vector = vector[: layout.size]
    device = torch.device(device)
    with isolated_randomness(EVALUATION_SEED, device):
        if isinstance(task, ArrayTask):
            local = {**local_of(model, layout), **(local or {})}
            arrays = arrays_of(layout, vector, local)
            evaluate_arrays = (task if context is None else in_context(task, context)).evaluate
            yield lambda data, ready=None: checked(evaluate_arrays(arrays, data), task)
            return
        module = module_of(model).to(device)
        told_task = task if context is None else in_context(task, context)

        def measure(data: Any, ready: Iterable[Batch] | None = None) -> Metrics:
            sums: Metrics = {}
            counts = Counts(task)
            given = ready
            if given is None:
                given = ordered_batches(data, batch_size, device, seed=EVALUATION_SEED)
            for batch in asking(islice(given, batches), before_batch):
                seed_batch(batch, device)
                loss = told_task.loss(module, batch.data)
                add(sums, {"loss": (float(loss) * batch.size, batch.size)})
                if (own := getattr(told_task, "metrics", None)) is not None:
                    found = checked(own(module, batch.data), task, reserved="loss")
                    counts.add(found, batch.size)
                    add(sums, found)
            counts.warn()
            return sums

        with borrowed(module, layout, vector, local):
            if prepare is not None:
                prepare(module)
            module.eval()
            with torch.no_grad():
                yield measure
