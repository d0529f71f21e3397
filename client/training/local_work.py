"""What a client's local training is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from roundtable.client.training.batches import batches_of, count_examples
from roundtable.client.training.loaders import drops_last
from roundtable.client.training.metrics import Metrics
from roundtable.client.training.silo_account import Protection
from roundtable.core.algorithms.contract import ClientAlgorithm, Compare
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.config import JobConfig
from roundtable.core.layout import Layout

Progress = Callable[[int, int, float], None]
BeforeBatch = Callable[[], None]


class Stopped(BaseException):
    """Raised where work is withdrawn; a BaseException, so that no task catches it."""


@dataclass(frozen=True)
class LocalWork:
    """One client's part of a round: it trains from the global `vector`, float32 [layout.size].

    `local` are the tensors that the client keeps between rounds: its own with rule `local`, its optimizer's
    and its algorithm's; where it has none yet, those in the model serve. `algorithm` None: the one that the
    job names, which is then no file. `alone`: whether others see the update as this client's own. `compare`
    is the `ClientRound`'s; None where nobody keeps what analyses have read.
    """

    job: JobConfig
    layout: Layout
    vector: Tensor
    round: int
    client: str
    local: Mapping[str, Tensor] | None = None
    algorithm: ClientAlgorithm | None = None
    alone: bool = False
    compare: Compare | None = None

    def rules(self) -> ClientAlgorithm:
        """The algorithm that the client trains by."""
        return self.algorithm or make_algorithm(self.job.algorithm)

    def of_steps(self, steps: int | None) -> LocalWork:
        """The same of so many steps, as the coordinator gave them by speed; None: as the job says.

        Whatever counts steps counts these: batches, schedules within the round, what hooks are told. The
        algorithm's own table stays the job's, by which its server reckons.
        """
        if steps is None:
            return self
        table = self.job.algorithm.model_copy(update={"steps": steps})
        job = self.job.model_copy(update={"algorithm": table})
        return replace(self, job=job, algorithm=self.rules())

    @property
    def _rate(self) -> float:
        return self.job.algorithm.learning_rate

    def context(self, data: Any, device: torch.device) -> Context:
        """What hooks and the task's methods are told about training on these data; None: nobody can count."""
        examples = None if data is None else count_examples(data)
        steps = steps_of(self.job, examples, drop_last=drops_last(data))
        return Context(self.job.title, self.round, self.client, steps, device, self.job.seed, self._rate)

    def evaluation_context(self, device: torch.device) -> Context:
        """What they are told when the round's model is evaluated: no step is taken then."""
        return Context(self.job.title, self.round, self.client, 0, device, self.job.seed, self._rate)


@dataclass(frozen=True)
class Execution:
    """Where and how the work is done.

    `progress` is called with (examples seen, examples to see, recent loss). `out`, if given, receives the
    update: float32 on CPU of shape [layout.sent.size]. `protection` serves where the silo itself makes the
    update private. With `micro_batch`, no more than so many examples are in memory at once: the same batches,
    their gradients added up from parts. `before_batch` is called before each batch and may raise `Stopped`.
    `arrives` serves where the algorithm goes ahead and the round's model is not there yet: after the last
    step it waits for that model and gives it, in the place of the `vector` that training was given.
    """

    device: str | torch.device = "cpu"
    progress: Progress | None = None
    out: Tensor | None = None
    protection: Protection | None = None
    micro_batch: int | None = None
    before_batch: BeforeBatch | None = None
    arrives: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class LocalUpdate:
    """What one client's training gives.

    `delta` is local − global, and behind it the algorithm's places: float32 of shape
    [layout.sent.size];
    `examples` the size of the training set; `loss` the mean training loss over the round; `metrics` named
    (sum, count), the loss among them; `local` the tensors that the client keeps, as training left them.
    """

    delta: Tensor
    examples: int
    steps: int
    loss: float
    metrics: Metrics = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)


def steps_of(job: JobConfig, examples: int | None, *, drop_last: bool = False) -> int | None:
    """Optimizer steps of a client's round over so many examples; None where only iterating would tell."""
    table = job.algorithm
    if table.steps is not None or examples is None:
        return table.steps
    return table.passes * batches_of(examples, table.batch_size, drop_last=drop_last)


def examples_to_see(job: JobConfig, data: object) -> int:
    """Examples that a round's training looks at."""
    table = job.algorithm
    if table.steps is not None:
        return table.steps * table.batch_size
    examples = count_examples(data) or 0
    return table.passes * (examples // table.batch_size * table.batch_size if drops_last(data) else examples)
