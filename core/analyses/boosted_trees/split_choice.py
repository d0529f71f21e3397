"""Which split of a node gains most, in the order and with the rounding of xgboost's tree method "hist".

gain = T(GL)²/(HL+λ) + T(GR)²/(HR+λ) − T(G)²/(H+λ), with T the soft threshold at α and G, H the sums of
gradients and Hessians left and right. Features are tried in ascending order, cuts upwards with missing values
right, then downwards with missing values left; the first of equal gains is taken. Gains are compared as
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundtable.core.analyses.boosted_trees.row_kernels import Whole
from roundtable.core.analyses.exact_sums import Doubles

LEAST_GAIN = np.float32(1e-6)
FAR = float(np.finfo(np.float32).max)
"""A bound of a node's weight that bounds nothing."""
Singles = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Growth:
    """How trees grow, by xgboost's parameters. `monotone` [features]: 1 rising, −1 falling, 0 free.
    `interactions`: the sets of features that may be on one path; none: any. `max_delta_step`: the largest
    weight of a node, 0 for none."""

    learning_rate: float = 0.3
    max_depth: int = 6
    reg_lambda: float = 1.0
    reg_alpha: float = 0.0
    gamma: float = 0.0
    min_child_weight: float = 1.0
    monotone: tuple[int, ...] = ()
    interactions: tuple[frozenset[int], ...] = ()
    max_delta_step: float = 0.0

    @property
    def constrained(self) -> bool:
        """Whether weights are bounded by monotone features."""
        return any(self.monotone)

    def weight(self, sums: Doubles, bounds: Doubles) -> Singles:
        """The weight of nodes whose sums are [..., (G, H)], within bounds [..., 2]."""
        gradient, hessian = sums[..., 0], sums[..., 1]
        lacking = (hessian < np.float32(self.min_child_weight)) | (hessian <= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            free = -self._soft(gradient) / (hessian + np.float32(self.reg_lambda))
        if self.max_delta_step:
            free = np.clip(free, -np.float32(self.max_delta_step), np.float32(self.max_delta_step))
        found = np.where(lacking, 0.0, free).astype(np.float32)
        if not self.constrained:
            return found
        low, high = (bounds[..., side].astype(np.float32) for side in (0, 1))
        return np.minimum(np.maximum(found, low), high)

    def gain(self, sums: Doubles, weight: Singles) -> Singles:
        """What a node of these sums gains with its weight."""
        gradient, hessian = sums[..., 0], sums[..., 1]
        shrink = np.float32(self.reg_lambda)
        if self.constrained or self.max_delta_step:
            g, h = gradient.astype(np.float32), hessian.astype(np.float32)
            found = -(np.float32(2.0) * g * weight + (h + shrink) * (weight * weight))
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                found = (self._soft(gradient) ** 2 / (hessian + shrink)).astype(np.float32)
        return np.where(hessian > 0, found, np.float32(0.0))

    def allowed(self, path: Sequence[int], features: int) -> npt.NDArray[np.bool_]:
        """The features by which a node may be split that has been split from by `path`."""
        found = np.ones(features, dtype=np.bool_)
        if self.interactions and path:
            together = frozenset(path)
            free = together.union(*(group for group in self.interactions if together <= group))
            found[:] = False
            found[list(free)] = True
        return found

    def _soft(self, gradient: Doubles) -> Doubles:
        alpha = float(np.float32(self.reg_alpha))
        found: Doubles = np.sign(gradient) * np.maximum(np.abs(gradient) - alpha, 0.0)
        return found


@dataclass(frozen=True)
class NodeSplit:
    """A node's best split: rows in bins up to `cut` of `feature` go left (−1: none but missing ones).

    left, right: sums (G, H, rows)."""

    gain: float
    feature: int
    cut: int
    missing_left: bool
    left: Doubles
    right: Doubles


class NodeSplits:
    """Finds splits over features whose bins lie at `offsets`, int64 [features + 1], the last bin of each
    being of missing values; a side has no fewer than `least` rows."""

    def __init__(self, offsets: Whole, growth: Growth, least: int) -> None:
        self.growth = growth
        self.least = least
        self.features = len(offsets) - 1
        bins = np.diff(offsets) - 1
        place = np.arange(int(bins.max()))
        self._there = place < bins[:, None]
        self._places = np.where(self._there, offsets[:-1, None] + place, offsets[-1])
        self._missing = offsets[1:] - 1
        self._first = slice(int(offsets[0]), int(offsets[1]))

    def totals(self, sums: Doubles) -> Doubles:
        """(G, H, rows) of nodes with histograms [nodes, bins, 3]."""
        found: Doubles = sums[:, self._first].sum(axis=1)
        return found

    def best(self, sums: Doubles, bounds: Doubles, allowed: npt.NDArray[np.bool_]) -> list[NodeSplit | None]:
        """For each node its best split, None where none is worth it: of histograms [nodes, bins, 3] of
        (G, H, rows), bounds of the nodes' weights [nodes, 2] and the features that each may use."""
        growth = self.growth
        total = self.totals(sums)
        held = np.concatenate([sums, np.zeros((len(sums), 1, 3))], axis=1)
        upwards = np.cumsum(held[:, self._places], axis=2)
        missing = sums[:, self._missing]
        downwards = missing[:, :, None] + np.concatenate(
            [np.zeros_like(upwards[:, :, :1]), upwards[:, :, :-1]], axis=2
        )
        # By feature: cuts upwards, then downwards.
        left = np.concatenate([upwards, downwards[:, :, ::-1]], axis=2)
        right = total[:, None, None] - left
        fits = np.concatenate([self._there, self._there[:, ::-1]], axis=1)[None] & allowed[:, :, None]
        fits = fits & ((missing[:, :, None, 2] > 0) | (np.arange(left.shape[2]) < self._there.shape[1]))
        for side in (left, right):
            fits &= (side[..., 1] >= np.float32(growth.min_child_weight)) & (side[..., 2] >= self.least)
        around = bounds[:, None, None]
        weights = [growth.weight(side, around) for side in (left, right)]
        parent = growth.gain(total, growth.weight(total, bounds))
        gains = growth.gain(left, weights[0]) + growth.gain(right, weights[1])
        if growth.constrained:
            sign = np.array(growth.monotone)[None, :, None]
            fits &= ~(((sign > 0) & (weights[0] > weights[1])) | ((sign < 0) & (weights[0] < weights[1])))
        gains = np.where(fits, gains - parent[:, None, None], np.float32(-np.inf))
        return [self._split(node, gains[node], left[node], right[node]) for node in range(len(sums))]

    def _split(self, node: int, gains: Singles, left: Doubles, right: Doubles) -> NodeSplit | None:
        feature, place = np.unravel_index(int(gains.argmax()), gains.shape)
        gain = gains[feature, place]
        if not (gain > LEAST_GAIN and gain >= np.float32(self.growth.gamma)):
            return None
        bins = self._there.shape[1]
        down = bool(place >= bins)
        # Downwards the first is the last place of the padded row, and its cut is the one below it.
        cut = 2 * bins - 1 - int(place) - 1 if down else int(place)
        return NodeSplit(
            float(gain), int(feature), cut, down, left[feature, place].copy(), right[feature, place].copy()
        )
