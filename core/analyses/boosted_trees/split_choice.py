"""Which split of a node gains most, in the order and with the rounding of xgboost's tree method "hist".

gain = T(GL)²/(HL+λ) + T(GR)²/(HR+λ) − T(G)²/(H+λ), with T the soft threshold at α and G, H the sums of
gradients and Hessians left and right. Features are tried in ascending order, cuts upwards with missing values
right, then downwards with missing values left; the first of equal gains is taken. Gains are float32, their
numerators and denominators rounded before they are divided: over millions of rows many cuts of a node gain
equally then, and which comes first decides. Compiled where there is a compiler, else in NumPy: the same split
either way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from roundtable.core.analyses.digit_kernels import address
from roundtable.core.analyses.exact_sums import Doubles, Singles, Whole
from roundtable.core.native_build import load_kernels

_SOURCE = Path(__file__).with_name("splits.cpp")

LEAST_GAIN = np.float32(1e-6)
FAR = float(np.finfo(np.float32).max)
"""A bound of a node's weight that bounds nothing."""


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
    def nodes(self) -> int:
        """Places of a tree's nodes."""
        return int(2 ** (self.max_depth + 1)) - 1

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
            found: Singles = -(np.float32(2.0) * g * weight + (h + shrink) * (weight * weight))
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                square: Singles = np.square(self._soft(gradient)).astype(np.float32)
                found = np.divide(square, (hessian + shrink).astype(np.float32))
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
    being of missing values; a side has no fewer than `least` rows. Histograms are of whole numbers, which
    `scale` [3] turns into (G, H, rows): products and sums of them are exact, in any order."""

    def __init__(self, offsets: Whole, growth: Growth, least: int, scale: Doubles) -> None:
        self.offsets = offsets
        self.growth = growth
        self.least = least
        self.scale = scale
        self.features = len(offsets) - 1
        bins = np.diff(offsets) - 1
        place = np.arange(int(bins.max()))
        self._there = place < bins[:, None]
        self._places = np.where(self._there, offsets[:-1, None] + place, offsets[-1])
        self._missing = offsets[1:] - 1
        self._first = slice(int(offsets[0]), int(offsets[1]))

    def total(self, histogram: Doubles) -> Doubles:
        """(G, H, rows) of a node with a histogram [3, bins]."""
        found: Doubles = histogram[:, self._first].sum(axis=1) * self.scale
        return found

    def best(self, histogram: Doubles, bounds: Doubles, allowed: npt.NDArray[np.bool_]) -> NodeSplit | None:
        """A node's best split, None where none is worth it: of its histogram [3, bins], the bounds [2] of its
        weight, and the features that it may use, bool [features]."""
        library = _library()
        if library is None:
            return self._best(histogram, bounds, allowed)
        growth = self.growth
        gain, chosen = np.empty(1, dtype=np.float32), np.zeros(3, dtype=np.int64)
        sides = np.zeros((2, 3))
        monotone = np.array(growth.monotone, dtype=np.int64)
        rules = (growth.reg_alpha, growth.min_child_weight, growth.reg_lambda, growth.max_delta_step)
        library.best_split(
            address(histogram),
            ctypes.c_int64(self.features),
            *(address(each) for each in (self.offsets, self.scale, bounds, allowed)),
            *(ctypes.c_double(float(np.float32(rule))) for rule in rules),
            ctypes.c_double(self.least),
            address(monotone) if growth.constrained else None,
            *(address(each) for each in (gain, chosen, sides)),
        )
        feature, cut, down = chosen.tolist()
        found = NodeSplit(float(gain[0]), feature, cut, bool(down), sides[0], sides[1])
        return found if self._pays(gain[0]) else None

    def _pays(self, gain: np.float32) -> bool:
        return bool(gain > LEAST_GAIN and gain >= np.float32(self.growth.gamma))

    def _best(self, histogram: Doubles, bounds: Doubles, allowed: npt.NDArray[np.bool_]) -> NodeSplit | None:
        growth = self.growth
        sums = np.ascontiguousarray(histogram.T) * self.scale
        total = sums[self._first].sum(axis=0)
        upwards = np.cumsum(np.concatenate([sums, np.zeros((1, 3))])[self._places], axis=1)
        missing = sums[self._missing]
        before = np.concatenate([np.zeros_like(upwards[:, :1]), upwards[:, :-1]], axis=1)
        # By feature: cuts upwards, then downwards.
        left = np.concatenate([upwards, (missing[:, None] + before)[:, ::-1]], axis=1)
        right = total - left
        fits = np.concatenate([self._there, self._there[:, ::-1]], axis=1) & allowed[:, None]
        fits &= (missing[:, None, 2] > 0) | (np.arange(left.shape[1]) < self._there.shape[1])
        for side in (left, right):
            fits &= (side[..., 1] >= np.float32(growth.min_child_weight)) & (side[..., 2] >= self.least)
        weights = [growth.weight(side, bounds) for side in (left, right)]
        parent = growth.gain(total, growth.weight(total, bounds))
        gains = growth.gain(left, weights[0]) + growth.gain(right, weights[1])
        if growth.constrained:
            sign = np.array(growth.monotone)[:, None]
            fits &= ~(((sign > 0) & (weights[0] > weights[1])) | ((sign < 0) & (weights[0] < weights[1])))
        gains = np.where(fits, gains - parent, np.float32(-np.inf))
        feature, place = np.unravel_index(int(gains.argmax()), gains.shape)
        gain = gains[feature, place]
        if not self._pays(gain):
            return None
        bins = self._there.shape[1]
        down = bool(place >= bins)
        # Downwards the first is the last place of the padded row, and its cut is the one below it.
        cut = 2 * bins - 1 - int(place) - 1 if down else int(place)
        sides = (left[feature, place].copy(), right[feature, place].copy())
        return NodeSplit(float(gain), int(feature), cut, down, *sides)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(_SOURCE, fused=False)
