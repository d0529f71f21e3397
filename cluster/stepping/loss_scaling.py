"""Scales losses in float16, whose smallest gradients would be 0 and whose largest would be infinite.

Dynamic loss scaling (Micikevicius et al. 2018, section 3.2): a step whose gradients are not all finite is not
taken, and the next is tried with half the scale; after many that were, with twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roundtable.core.errors import EncodingError

NAME = "cluster/loss_scale"
"""The name of the kept scale among the tensors that stay at the silo."""
GROWS_AFTER = 2000
_INITIAL, _LEAST, _MOST = 2.0**16, 1.0, 2.0**60


@dataclass
class LossScale:
    """The scale of the next step's losses, a power of two, the same on all ranks.

    `good` counts the steps taken since it last changed.
    """

    scale: float = _INITIAL
    good: int = 0

    @property
    def least(self) -> bool:
        """Whether it cannot be halved: gradients that overflow now would do so unscaled."""
        return self.scale <= _LEAST

    def taken(self) -> None:
        """After a step."""
        self.good += 1
        if self.good >= GROWS_AFTER:
            self.scale, self.good = min(_MOST, 2 * self.scale), 0

    def overflowed(self) -> None:
        """After gradients that were not finite on some rank; the step was not taken."""
        self.scale, self.good = max(_LEAST, self.scale / 2), 0

    def to_tensor(self) -> Tensor:
        """What is kept between rounds, float64 [2]: the scale and `good`."""
        return torch.tensor([self.scale, self.good], dtype=torch.float64)

    @classmethod
    def kept(cls, tensors: Mapping[str, Tensor]) -> LossScale:
        """The scale that the round before left among a silo's own tensors; a fresh one where there is none.

        Raises EncodingError for a tensor that `to_tensor` did not make.
        """
        kept = tensors.get(NAME)
        if kept is None:
            return cls()
        scale, good = kept.tolist() if kept.dtype == torch.float64 and kept.shape == (2,) else (0.0, 0.0)
        if not (_LEAST <= scale <= _MOST and 0 <= good < GROWS_AFTER):
            raise EncodingError(
                f"the kept loss scale is damaged ({kept.flatten()[:2].tolist()}); remove the job's folder "
                "from the agent's state folder to begin anew"
            )
        return cls(scale, int(good))
