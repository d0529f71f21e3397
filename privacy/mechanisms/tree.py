"""Tree aggregation (Dwork et al. 2010; Kairouz et al. 2021): the plain ancestor of banded noise.

Every node of a binary tree over the rounds has its own noise, and a prefix sum carries the noise of the
few nodes that make it up. Kept to compare with: `ftrl.MatrixMechanism` has less noise for the same ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.privacy.mechanisms.gaussian import standard_normal
from roundtable.privacy.mechanisms.noise import NoiseSource


@dataclass(frozen=True)
class TreeFTRL:
    """Tree aggregation over `rounds` with participations of a silo at least `separation` rounds apart."""

    clip_norm: float
    noise_multiplier: float
    rounds: int
    separation: int

    def __post_init__(self) -> None:
        if not (
            self.clip_norm > 0.0 and self.noise_multiplier > 0.0 and self.rounds >= 1 and self.separation >= 1
        ):
            raise PrivacyError(
                "tree aggregation needs clip_norm, noise_multiplier, rounds, separation above 0"
            )

    @property
    def levels(self) -> int:
        """Levels of nodes that are ever whole, and so ever used, within the rounds."""
        return self.rounds.bit_length()

    @property
    def sensitivity(self) -> float:
        """Of all node sums together to one silo with contributions of norm 1.

        On the level of nodes w wide, each holds at most m = ⌈w / separation⌉ of the silo's k
        participations; the squares of the counts are largest where as many nodes as possible hold m.
        """
        k = math.ceil(self.rounds / self.separation)
        total = 0
        for level in range(self.levels):
            most = min(k, math.ceil(2**level / self.separation))
            total += (k // most) * most**2 + (k % most) ** 2
        return math.sqrt(total)

    @property
    def standard_deviation(self) -> float:
        """σ of each node's noise."""
        return self.noise_multiplier * self.clip_norm * self.sensitivity

    def prefix_error(self) -> float:
        """Root mean square over rounds of the noise on a prefix sum: one node for each one-bit of a round."""
        nodes = sum(round.bit_count() for round in range(1, self.rounds + 1))
        return self.standard_deviation * math.sqrt(nodes / self.rounds)

    def init(self, dimension: int) -> TreeNoise:
        """The noise before round 1."""
        return TreeNoise(self, torch.zeros(self.levels, dimension, dtype=torch.float64), 0)


@dataclass(frozen=True)
class TreeNoise:
    """The noise of the nodes that the present prefix is made of, one for each level at most."""

    plan: TreeFTRL
    nodes: Tensor
    done: int

    def apply(self, source: NoiseSource) -> tuple[Tensor, TreeNoise]:
        """The next round's noise (the change of the prefix's), float64 `[d]`, and the state after it."""
        if self.done >= self.plan.rounds:
            raise PrivacyError(
                f"all {self.plan.rounds} rounds of this run have had their noise; plan a new run"
            )
        level = ((self.done + 1) & -(self.done + 1)).bit_length() - 1
        fresh = standard_normal(source, self.nodes.shape[1]).mul_(self.plan.standard_deviation)
        nodes = self.nodes.clone()
        change = fresh - nodes[:level].sum(0)
        nodes[:level] = 0.0
        nodes[level] = fresh
        return change, replace(self, nodes=nodes, done=self.done + 1)
