"""How the coordinator grows trees out of summed histograms, round by round.

A round asks for the histograms of some nodes, of two siblings only for the one with fewer rows: the other's
is their parent's less it. Nodes are kept as a heap: the children of n are 2n + 1 and 2n + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from roundtable.core.analyses.boosted_trees.row_kernels import CHANNELS
from roundtable.core.analyses.boosted_trees.split_choice import FAR, Growth, NodeSplit, NodeSplits
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape, Whole
from roundtable.core.errors import ProtocolError

NONE = -1.0
MOST_CUTS = 4096


def split_code(feature: int, cut: int, missing_left: bool) -> float:
    """A split as one number, from 0 on; `cut` from −1 on."""
    return float((feature * MOST_CUTS + cut + 1) * 2 + missing_left)


def split_parts(codes: Doubles) -> tuple[Whole, Whole, Whole]:
    """(feature, cut, whether missing values go left) of such numbers; feature −1 where there is no split."""
    whole = codes.astype(np.int64)
    there = whole >= 0
    feature, cut = np.divmod(np.where(there, whole // 2, 0), MOST_CUTS)
    return np.where(there, feature, -1), cut - 1, np.where(there, whole % 2, 0)


def _histogram_at(place: int) -> str:
    return f"histogram {place}"


def check_trees(split: Doubles, features: int) -> None:
    """ProtocolError for trees [trees, nodes] that nobody can go down: splits by features or below nodes that
    are not there."""
    leaves = split[:, split.shape[1] // 2 :]
    if not (split < split_code(features, -1, False)).all() or (leaves >= 0).any():
        raise ProtocolError("the analysis came with trees that are none of its features and depth")


@dataclass(frozen=True)
class Grower:
    """Grows `outputs` trees side by side, `trees` times; at most `slots` histograms a round.

    `scale` [3] turns the whole numbers of a histogram into (G, H, rows).
    """

    offsets: Whole
    growth: Growth
    least: int
    trees: int
    outputs: int
    slots: int
    scale: Doubles = field(default_factory=lambda: np.ones(CHANNELS))

    @property
    def nodes(self) -> int:
        """Places of a tree's nodes."""
        return self.growth.nodes

    @property
    def held(self) -> int:
        """Histograms that are kept at most, of nodes whose children's are not there yet."""
        return self.outputs * int(2 ** max(0, self.growth.max_depth - 2))

    @property
    def rounds(self) -> int:
        """The most rounds that the trees of one time take."""
        wanted = [self.outputs, *(self.outputs * 2**level for level in range(self.growth.max_depth - 1))]
        return sum(-(-count // self.slots) for count in wanted)

    @property
    def public(self) -> dict[str, Shape]:
        """Shapes of what every party sees: how often trees are done, what is asked, and the trees."""
        each = (self.trees * self.outputs, self.nodes)
        return {
            "done": (1,),
            "asked": (self.slots,),
            "split": each,
            "weight": each,
            "gain": each,
            "hessian": each,
        }

    @property
    def kept(self) -> dict[str, Shape]:
        """Shapes of what only the coordinator keeps."""
        return {
            "owner": (self.held,),
            **dict.fromkeys(map(_histogram_at, range(self.held)), (CHANNELS, int(self.offsets[-1]))),
            "bounds": (self.outputs, self.nodes, 2),
            "queue": (self.outputs,),
        }

    @cached_property
    def _finder(self) -> NodeSplits:
        return NodeSplits(self.offsets, self.growth, max(self.least, 1), self.scale)

    def start(self) -> dict[str, Any]:
        """The numbers with which the first trees begin."""
        empty = np.full((self.trees * self.outputs, self.nodes), NONE)
        return {"done": 0.0, "split": empty, **self._roots()}

    def check(self, public: Arrays) -> None:
        """ProtocolError for trees that nobody can go down, or more trees than there are to be."""
        check_trees(public["split"], len(self.offsets) - 1)
        if not 0 <= float(public["done"][0]) <= self.trees:
            raise ProtocolError("the analysis came with more trees than it is to grow")

    def _roots(self) -> dict[str, Any]:
        bounds = np.empty((self.outputs, self.nodes, 2))
        bounds[:] = [-FAR, FAR]
        left = np.arange(self.outputs) >= self.slots
        roots = np.arange(self.slots) * float(self.nodes)
        return {
            "owner": NONE,
            "bounds": bounds,
            "queue": left.astype(np.float64),
            "asked": np.where(np.arange(self.slots) < self.outputs, roots, NONE),
        }

    def step(self, public: Arrays, histograms: Mapping[int, Doubles]) -> dict[str, Any]:
        """What follows from the histograms that were asked for, by slot, whole numbers [3, bins] each;
        `public` has the coordinator's own numbers, too."""
        growing = _Growing(self, public)
        for output, node, whole in growing.ready(histograms):
            growing.split(self._finder, output, node, whole)
        return growing.after()


class _Growing:
    def __init__(self, grower: Grower, public: Arrays) -> None:
        self.of = grower
        self.done = int(public["done"][0])
        self.asked = public["asked"].astype(np.int64)
        names = ("split", "weight", "gain", "hessian", "bounds", "owner", "queue")
        self.now: dict[str, Any] = {name: public[name].copy() for name in names}
        self.before = public

    def _row(self, output: int) -> int:
        return self.done * self.of.outputs + output

    def ready(self, histograms: Mapping[int, Doubles]) -> list[tuple[int, int, Doubles]]:
        """(output, node, histogram) of the nodes whose histograms are known now."""
        found = []
        for slot in np.flatnonzero(self.asked >= 0):
            output, node = divmod(int(self.asked[slot]), self.of.nodes)
            found.append((output, node, histograms[int(slot)]))
            if not node:
                continue
            parent = output * self.of.nodes + (node - 1) // 2
            place = int(np.flatnonzero(self.now["owner"] // 2 == parent)[0])
            other = node + 1 if node % 2 else node - 1
            found.append((output, other, self.before[_histogram_at(place)] - histograms[int(slot)]))
            self.now["owner"][place] = NONE
        return found

    def split(self, finder: NodeSplits, output: int, node: int, whole: Doubles) -> None:
        """Splits a node where that gains enough."""
        bounds = self.now["bounds"][output, node].copy()
        if node == 0:
            total = finder.total(whole)
            self.now["weight"][self._row(output), 0] = self.of.growth.weight(total, bounds)
            self.now["hessian"][self._row(output), 0] = total[1]
        chosen = finder.best(whole, bounds, self._allowed(output, node))
        if chosen is not None:
            self._take(output, node, chosen, whole)

    def _allowed(self, output: int, node: int) -> Any:
        path = []
        while node:
            node = (node - 1) // 2
            feature = split_parts(self.now["split"][self._row(output), [node]])[0]
            path.append(int(feature[0]))
        return self.of.growth.allowed(path, len(self.of.offsets) - 1)

    def _take(self, output: int, node: int, chosen: NodeSplit, whole: Doubles) -> None:
        now, row, growth = self.now, self._row(output), self.of.growth
        own = now["bounds"][output, node]
        now["split"][row, node] = split_code(chosen.feature, chosen.cut, chosen.missing_left)
        now["gain"][row, node] = chosen.gain
        children = (2 * node + 1, 2 * node + 2)
        weights = [growth.weight(side, own) for side in (chosen.left, chosen.right)]
        for child, side, weight in zip(children, (chosen.left, chosen.right), weights, strict=True):
            now["weight"][row, child] = weight
            now["hessian"][row, child] = side[1]
            now["bounds"][output, child] = own
        sign = growth.monotone[chosen.feature] if growth.constrained else 0
        if sign:
            middle = float((weights[0] + weights[1]) / np.float32(2.0))
            now["bounds"][output, children[0], 1 if sign > 0 else 0] = middle
            now["bounds"][output, children[1], 0 if sign > 0 else 1] = middle
        depth = (node + 1).bit_length() - 1
        if depth + 1 < growth.max_depth:
            place = int(np.flatnonzero(now["owner"] < 0)[0])
            small_right = chosen.right[2] < chosen.left[2]
            now["owner"][place] = (output * self.of.nodes + node) * 2 + small_right
            now[_histogram_at(place)] = whole

    def after(self) -> dict[str, Any]:
        """The next public and kept numbers."""
        of, waiting = self.of, []
        for code in self.now["owner"][self.now["owner"] >= 0].astype(np.int64):
            output, node = divmod(int(code) // 2, of.nodes)
            waiting.append((2 * node + 1 + int(code) % 2, output))
        waiting += [(0, int(output)) for output in np.flatnonzero(self.now["queue"])]
        next_ones = sorted(waiting)[: of.slots]
        asked = np.full(of.slots, NONE)
        for slot, (node, output) in enumerate(next_ones):
            asked[slot] = output * of.nodes + node
            if not node:
                self.now["queue"][output] = 0.0
        if next_ones:
            return {**self.now, "asked": asked}
        return {**self.now, **of._roots(), "done": float(self.done + 1)}
