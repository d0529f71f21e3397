"""Whether a step may be taken: losses and gradients that are not finite, and losses that jump."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundtable.cluster.parallel.text_collectives import gather_text
from roundtable.core.errors import InvalidUpdate

_WINDOW = 16
_LEARNING = 8
_DEVIATIONS = 6.0


class LossGuard:
    """Notices a loss far above those of the steps before: a sign that training is about to go wrong.

    Far is six deviations and twice the mean of about the last sixteen steps. After a jump the next few are
    not told of: they are the same one.
    """

    def __init__(self) -> None:
        self._mean = self._variance = 0.0
        self._seen = self._quiet = 0

    def jumped(self, loss: float) -> bool:
        """Takes a step's loss; whether it is a jump."""
        self._quiet = max(0, self._quiet - 1)
        above = loss - self._mean
        far = max(_DEVIATIONS * math.sqrt(self._variance), abs(self._mean))
        if self._seen >= _LEARNING and above > far:
            told, self._quiet = self._quiet > 0, _LEARNING
            return not told
        self._seen += 1
        share = 1.0 / min(self._seen, _WINDOW)
        self._variance = (1.0 - share) * (self._variance + share * above * above)
        self._mean += share * above
        return False


def refuse_step(loss: float, norm: float, own: Sequence[float], step: int, round: int) -> InvalidUpdate:
    """Why a step was not taken; all ranks call it together, each with its `own` micro-batches' losses."""
    said = gather_text("" if all(map(math.isfinite, own)) else "loss")
    ranks = [str(rank) for rank, text in enumerate(said) if text]
    what = "gradient norm" if math.isfinite(loss) else "training loss"
    value = norm if math.isfinite(loss) else loss
    where = f" (first on rank {' and '.join(ranks[:4])})" if ranks else " (every rank's loss is finite)"
    return InvalidUpdate(
        "non_finite",
        f"the {what} is {value} at step {step} of round {round}{where}, and the step was not taken; lower "
        "[algorithm] learning_rate, set max_gradient_norm, or look for bad values in the data",
    )
