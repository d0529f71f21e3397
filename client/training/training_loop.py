"""The loop of one round: a gradient for each batch, corrected and clipped, and a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundtable.client.training.algorithm_round import AlgorithmRound
from roundtable.client.training.batches import Batch, asking, count_examples
from roundtable.client.training.local_work import Execution, LocalWork, Progress, examples_to_see
from roundtable.client.training.metrics import Metrics, training_sums
from roundtable.client.training.micro_batches import backward_in_parts, check_splittable
from roundtable.client.training.module_work import ModuleWork
from roundtable.client.training.sgd import SGD, Correction, RoundSchedule, make_correction
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.config import JobConfig
from roundtable.core.errors import InvalidUpdate, TaskError
from roundtable.core.task import Task

# Reading a loss back waits for the device, so losses are looked at so many at a time.
_CHECK_EVERY = 16


class Optimizer(Protocol):
    """What moves the weights."""

    def step(self) -> Any: ...


class TrainingLoop:
    """One round's training of a module; `steps` counts those taken."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        work: LocalWork,
        rules: AlgorithmRound,
        execution: Execution,
    ) -> None:
        self._task = task
        self._module = module
        self._parameters = parameters
        self._rules = rules
        self._micro_batch = execution.micro_batch
        resting = set(rules.algorithm.resting(module))
        self._resting = [parameter for name, parameter in module.named_parameters() if name in resting]
        self._place = f"round {work.round}"
        self._losses = _Losses(self._place)
        self.optimizer = make_optimizer(task, parameters, work.job, rules.step, work.round)
        self._own: ModuleWork | None = None
        if type(rules.algorithm).makes_gradients():
            layout = work.layout.model
            self._own = ModuleWork(task, module, parameters, rules, layout, self._gradient)
        self._schedule = RoundSchedule(self.optimizer, work.job, work.round, rules.round.context.steps)
        self.steps = 0

    def fit(self, batches: Iterator[Batch], correct: Correction | None, watch: Watch | None = None) -> None:
        """Takes one optimizer step for each batch. Raises InvalidUpdate for a loss that is not finite."""
        for batch in batches:
            self._forget()
            loss = self._gradient(batch) if self._own is None else self._own_gradient(self._own, batch)
            if correct is not None:
                correct()
            for parameter in self._resting:
                parameter.grad = None
            if self._rules.step.max_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, self._rules.step.max_norm)
            self._schedule.before(self.steps + 1)
            self.optimizer.step()
            self.steps += 1
            self._losses.add(loss.detach(), batch, watch)
        self._losses.look(watch)
        self._forget()
        if self._own is not None:
            self._rules.ends_held(self._own.ended())

    @property
    def loss(self) -> float:
        """Mean over all examples seen."""
        return self._losses.total / self._losses.seen

    def metrics(self) -> Metrics:
        """The loss, and tokens where they are known, as (sum, count)."""
        return training_sums(self._task, self._losses.total, self._losses.seen)

    def examples(self, data: Any) -> int:
        """The data set's size; for a stream what was seen of it."""
        known = count_examples(data)
        return self._losses.seen if known is None else known

    def _forget(self) -> None:
        """Takes all gradients away: those of parameters that a task's optimizer leaves out would add up, and
        clipping counts them."""
        for parameter in self._parameters:
            parameter.grad = None

    def _gradient(self, batch: Batch) -> Tensor:
        if self._micro_batch is not None:
            if self.steps == 0:
                check_splittable(self._task, self._module, batch, self._micro_batch)
            return backward_in_parts(self._task, self._module, batch, self._micro_batch)
        loss = self._task.loss(self._module, batch.data)
        if self.steps == 0:
            check_loss(loss, self._task)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _own_gradient(self, own: ModuleWork, batch: Batch) -> Tensor:
        own.phase = self._rules.phase(self.steps + 1)
        loss, gradients = own.take(batch)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss


def train_second(
    task: Task,
    module: nn.Module,
    rules: AlgorithmRound,
    batches: Sequence[Batch],
    steps: int,
    execution: Execution,
) -> None:
    """Trains a client's second model, of which `module` holds the start, on the round's batches in a circle;
    `steps` are those of the round."""
    second, parts = rules.second, execution.micro_batch
    assert second is not None
    parameters = [parameter for parameter in module.train().parameters() if parameter.requires_grad]
    optimizer = SGD(parameters, second.rate, second.step.momentum, second.step.weight_decay)
    correct = make_correction(second.step, parameters, rules.second_constants(module, parameters))
    for batch in asking(islice(cycle(batches), second.steps or steps), execution.before_batch):
        optimizer.zero_grad()
        if parts is None:
            task.loss(module, batch.data).backward()  # type: ignore[no-untyped-call]
        else:
            backward_in_parts(task, module, batch, parts)
        if correct is not None:
            correct()
        if second.step.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, second.step.max_norm)
        optimizer.step()


Watch = Callable[[int, float], None]
"""Called with (examples seen, recent loss) from time to time."""


class _Losses:
    """Losses of steps, read back from the device so many at a time."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._pending: list[tuple[Tensor, int, int]] = []
        self._steps = 0
        self.total = 0.0
        self.seen = 0

    def add(self, loss: Tensor, batch: Batch, watch: Watch | None) -> None:
        """After a step."""
        self._steps += 1
        self._pending.append((loss, batch.epoch, batch.size))
        if len(self._pending) == _CHECK_EVERY:
            self.look(watch)

    def look(self, watch: Watch | None) -> None:
        """Reads what is pending. Raises InvalidUpdate for a loss that is not finite."""
        if not self._pending:
            return
        losses = torch.stack([loss for loss, _, _ in self._pending]).tolist()
        first = self._steps - len(losses) + 1
        for number, (loss, (_, epoch, size)) in enumerate(zip(losses, self._pending, strict=True), first):
            if not math.isfinite(loss):
                raise InvalidUpdate(
                    "non_finite",
                    f"the training loss is {loss} at step {number}, epoch {epoch} of {self._place}; lower "
                    "[algorithm] learning_rate, set max_gradient_norm, or look for bad values in the data",
                )
            self.total += loss * size
            self.seen += size
        self._pending.clear()
        if watch is not None:
            watch(self.seen, losses[-1])


def make_optimizer(
    task: Task, parameters: Sequence[nn.Parameter], job: JobConfig, step: LocalStep, round: int
) -> Optimizer:
    """The task's own optimizer with the round's decay, or SGD as the algorithm's step says."""
    table = job.algorithm
    make: Callable[[Iterable[nn.Parameter]], Any] | None = getattr(task, "optimizer", None)
    own = make(parameters) if make is not None else None
    if own is None:
        return SGD(parameters, table.rate(round), step.momentum, step.weight_decay)
    for group in own.param_groups:
        group["lr"] *= table.rate(round) / table.learning_rate
    optimizer: Optimizer = own
    return optimizer


def watched(progress: Progress | None, work: LocalWork, data: Any) -> Watch | None:
    """`progress` as the loop calls it."""
    if progress is None:
        return None
    total, report = examples_to_see(work.job, data), progress
    return lambda seen, loss: report(seen, total, loss)


def check_loss(loss: Any, task: Task) -> None:
    """Raises TaskError for a loss that is no scalar tensor."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"{type(task).__name__}.loss() must return a scalar tensor, not {found}")
