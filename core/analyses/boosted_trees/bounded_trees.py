"""What boosted trees under noise are made of: losses whose gradients have a bound, sums that agree with each
other, and weights that count the noise in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.boosting_objectives import (
    GRAIN,
    Boosting,
    LogisticLoss,
    SoftmaxLoss,
)
from roundtable.core.analyses.boosted_trees.row_kernels import PAIR
from roundtable.core.analyses.boosted_trees.split_choice import Growth
from roundtable.core.analyses.exact_sums import Doubles, Singles, Whole

RESIDUAL_SPREAD = 0.25
"""Standard deviation of a number's residuals, of half its range, that shrinking leaves reckons with."""


@dataclass(frozen=True)
class BoundedLoss(Boosting):
    """A loss with gradients that are cut to norms [rows] over the outputs: `gradient` of the loss's `scale`,
    and `hessian`."""

    of: Boosting = field(default_factory=Boosting)
    scale: float = 1.0
    gradient: float = 1.0
    hessian: float = 1.0

    @classmethod
    def bounding(cls, of: Boosting, scale: float) -> BoundedLoss:
        """For a loss; a number's gradients are scaled by half of its range."""
        if isinstance(of, SoftmaxLoss):
            bounds = math.sqrt(2.0), math.sqrt(1.0 - 1.0 / of.outputs)
        elif isinstance(of, LogisticLoss):
            bounds = 1.0, 0.25
        else:
            bounds = 1.0, 1.0
        return cls(of.outputs, 1.0, of.classes, of=of, scale=scale, gradient=bounds[0], hessian=bounds[1])

    @override
    def margin(self, base: float) -> np.float32:
        return self.of.margin(base)

    @override
    def pairs(
        self,
        margins: Singles,
        outcome: Singles,
        around: Doubles | None = None,
        weights: Singles | None = None,
    ) -> npt.NDArray[np.void]:
        with np.errstate(over="ignore", invalid="ignore"):
            gradient, hessian = self.of.gradients(margins, outcome)
        found = np.empty(gradient.T.shape, dtype=PAIR)
        for name, values, bound in (
            ("gradient", gradient / np.float32(self.scale), self.gradient),
            ("hessian", hessian, self.hessian),
        ):
            # Towards 0, so that no rounding goes beyond the bound.
            found[name] = np.trunc(_cut_rows(values.astype(np.float64), bound).T * GRAIN)
        return found


def _cut_rows(values: Doubles, bound: float) -> Doubles:
    finite = np.nan_to_num(values, nan=0.0, posinf=bound, neginf=-bound)
    norms = np.linalg.norm(finite, axis=1)
    cut: Doubles = finite * np.minimum(1.0, bound / np.maximum(norms, bound))[:, None]
    return cut


def agreeing(sums: Doubles, offsets: Whole) -> Doubles:
    """The sums [..., bins, any] nearest in least squares that have the same total by each feature, whose bins
    begin at `offsets`: each row of a node is in one bin of each."""
    after, bins = sums.copy(), np.diff(offsets)
    parts = [slice(start, stop) for start, stop in pairwise(offsets)]
    own = np.stack([sums[..., part, :].sum(axis=-2) for part in parts])
    total = np.average(own, axis=0, weights=1.0 / bins)
    for feature, part in enumerate(parts):
        after[..., part, :] += ((total - own[feature]) / bins[feature])[..., None, :]
    return after


def shrunk(growth: Growth, sums: Doubles, variance: Doubles, blur: float) -> tuple[Doubles, Doubles]:
    """Weights and gains of nodes with sums (G, H) [2, nodes]: of noise on G of this variance, in units of
    that of a gradient given its Hessian, and of standard deviation `blur` on H.

    With G = −H w + noise and w a priori normal with precision λ, the posterior mean is −G / (H + λ (1 +
    variance / H)): where noise is all there is, it is 0.
    """
    hessian = np.maximum(sums[1], blur)
    shrink = growth.reg_lambda * (1 + variance / hessian)
    soft = np.sign(sums[0]) * np.maximum(np.abs(sums[0]) - growth.reg_alpha, 0.0)
    lacking = sums[1] < growth.min_child_weight
    found = np.where(lacking, 0.0, -soft / (hessian + shrink))
    return found, np.where(lacking, 0.0, soft**2 / (hessian + shrink))


def reached_nodes(splits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The nodes of a tree that there are."""
    found = np.zeros(len(splits), dtype=np.bool_)
    found[0] = True
    for node in np.flatnonzero(splits):
        if found[node]:
            found[[2 * node + 1, 2 * node + 2]] = True
    return found
