"""Detects losses that jump, and refuses steps whose loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundtable.cluster.parallel.text_collectives import gather_text
from roundtable.core.errors import InvalidUpdate

_WINDOW = 16
_LEARNING = 8
_DEVIATIONS = 6.0


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
