"""What is told of a round's steps as they are taken, and what is wished of them from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from roundtable.client.training.metrics import Metrics


@dataclass(frozen=True)
class StepReport:
    """One step as the whole group saw it.

    `norm` is the gradient's before clipping; `seconds` the step's, of which `waiting` for data and
    `communicating` with a collective under way, overlapped or not (None before it is first sampled).
    `memory` is the most bytes that this rank's device held so far; on a CPU, that its process did. `tokens`
    of the step's examples, 0 where they are none. `utilisation` is the share of all devices' peak that the
    model's own operations came to; None where the peak is not known.
    """

    step: int
    steps: int
    examples: int
    loss: float
    norm: float
    learning_rate: float
    seconds: float
    waiting: float
    memory: int
    tokens: int = 0
    communicating: float | None = None
    utilisation: float | None = None


@dataclass
class RoundProgress:
    """How far a round is: sums over the examples seen."""

    seen: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    norm_sum: float = 0.0
    steps: int = 0


Watch = Callable[[StepReport], None]


@dataclass
class Wishes:
    """What is wished of a step from outside, as rank 0 knows it; all ranks hear of it with the step's loss.

    `stop`: the round is withdrawn. `due`: it is time for a checkpoint.
    """

    stop: Callable[[], bool] = lambda: False
    due: Callable[[], bool] = lambda: False

    def told(self) -> list[float]:
        """Both as numbers: rank 0's own, 0 on other ranks."""
        first = dist.get_rank() == 0
        return [float(first and self.stop()), float(first and self.due())]


def round_metrics(done: RoundProgress, *, private: bool) -> Metrics:
    """The loss, the gradient's norm and the speed; under privacy the loss alone, as from any silo."""
    metrics: Metrics = {"loss": (done.loss_sum, done.seen)}
    if not private and done.steps:
        metrics["gradient_norm"] = (done.norm_sum, done.steps)
        metrics["examples_per_second"] = (done.seen / max(done.seconds, 1e-9), 1)
    return metrics
