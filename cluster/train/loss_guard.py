"""When a checkpoint is worth it in a round, by its losses and gradients; which steps are refused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.parallel.meshes import gather_text
from roundtable.core.errors import InvalidUpdate

_WINDOW = 16
_LEARNING = 8
_DEVIATIONS = 6.0
_LARGEST_NORM = 100.0
_STRIDE = 20
_BETTER = 0.95


class LossGuard:
    """Detects a loss far above those of the steps before: a sign that training is about to go wrong.

    Far is six deviations and twice the mean of about the last sixteen steps. Losses right after a jump count
    as the same one.
    """

    def __init__(self) -> None:
        self._mean = self._variance = 0.0
        self._seen = self._quiet = 0

    def jumped(self, loss: float) -> bool:
        """Takes a step's loss, and returns whether it is a jump."""
        self._quiet = max(0, self._quiet - 1)
        above = loss - self._mean
        far = max(_DEVIATIONS * math.sqrt(self._variance), abs(self._mean))
        if self._seen >= _LEARNING and above > far:
            is_new = self._quiet == 0
            self._quiet = _LEARNING
            return is_new
        self._seen += 1
        share = 1.0 / min(self._seen, _WINDOW)
        self._variance = (1.0 - share) * (self._variance + share * above * above)
        self._mean += share * above
        return False


class NormGuard:
    """Detects a gradient whose norm begins to be above 100, or twice the running mean away from that mean.

    It begins once: norms that stay there are the same event, and so are the next eight steps.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = self._quiet = 0
        self._above = False

    def jumped(self, norm: float) -> bool:
        """Takes a step's norm before clipping, and returns whether something begins with it."""
        self._quiet = max(0, self._quiet - 1)
        above = norm > _LARGEST_NORM
        odd = self._seen >= _LEARNING and abs(norm - self._mean) > 2 * self._mean
        begins = (odd or (above and not self._above)) and self._quiet == 0
        self._above = above
        if begins:
            self._quiet = _LEARNING
        if not odd:
            self._seen += 1
            self._mean += (norm - self._mean) / min(self._seen, _WINDOW)
        return begins


class Milestones:
    """Detects that the mean loss of 20 steps is 5 % below that of the last milestone's 20 steps."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._steps = 0
        self._best = math.inf

    def reached(self, loss: float) -> bool:
        """Takes a step's loss, and returns whether a milestone is reached with it; the first 20 are none."""
        self._sum += loss
        self._steps += 1
        if self._steps < _STRIDE:
            return False
        mean, first = self._sum / _STRIDE, math.isinf(self._best)
        self._sum, self._steps = 0.0, 0
        # Five per cent of its size: a loss may be negative.
        if not first and mean > self._best - (1 - _BETTER) * abs(self._best):
            return False
        self._best = mean
        return not first


class CheckpointTimes:
    """When `[cluster]` wants a checkpoint within a round; the same on all ranks, which see the same figures.

    The clock is rank 0's: what it wishes is agreed on with the step's loss.
    """

    def __init__(self, table: ClusterTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._saved = clock()
        self._losses = LossGuard()
        self._norms = NormGuard()
        self._milestones = Milestones()

    def due(self) -> bool:
        """Whether the time since the last one is over; asked on rank 0."""
        minutes = self._table.checkpoint_minutes
        return bool(minutes) and self._clock() - self._saved >= 60 * minutes

    def saved(self) -> None:
        """One was made: the time begins anew."""
        self._saved = self._clock()

    def before(self, loss: float, norm: float) -> bool:
        """Whether the weights before the step with this loss and norm are worth one."""
        if not self._table.keeps_checkpoints:
            return False
        jumped, odd = self._losses.jumped(loss), self._norms.jumped(norm)
        wanted = self._table.checkpoint_on
        return ("loss_jump" in wanted and jumped) or ("gradient_norm" in wanted and odd)

    def after(self, step: int, loss: float, due: bool) -> bool:
        """Whether the weights after this step are; `due` is what rank 0 said."""
        if not self._table.keeps_checkpoints:
            return False
        every = self._table.checkpoint_steps
        reached = self._milestones.reached(loss) and "milestone" in self._table.checkpoint_on
        return due or reached or bool(every and step % every == 0)


def last_sound(step: int) -> str:
    """From where a round could go on whose checkpoint is of this step; 0: it has none."""
    if step:
        return f"the round's last sound checkpoint is that of step {step}, in the silo's state folder"
    return "the round has no checkpoint, so it would begin anew ([cluster] checkpoint_steps keeps some)"


def refuse_step(loss: float, norm: float, own: Sequence[float], step: int, round: int) -> InvalidUpdate:
    """The error of a step that was not taken. Collective: each rank gives its `own` micro-batches' losses."""
    lossy = gather_text("" if all(map(math.isfinite, own)) else "loss")
    ranks = [str(rank) for rank, text in enumerate(lossy) if text]
    what = "gradient norm" if math.isfinite(loss) else "training loss"
    value = norm if math.isfinite(loss) else loss
    where = f" (first on rank {' and '.join(ranks[:4])})" if ranks else " (every rank's loss is finite)"
    return InvalidUpdate(
        "non_finite",
        f"the {what} is {value} at step {step} of round {round}{where}, and the step was not taken; lower "
        "[algorithm] learning_rate, set max_gradient_norm, or look for bad values in the data",
    )
