"""Where tokens go when the experts that they chose have too many: to others, or past all.

Loads are counted in each example alone, the groups of GShard (Lepikhin et al. 2021, section 2.2). So what
becomes of a token depends on its own example, and not on how ranks and micro-batches share examples out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

CROWDED = 1.5
"""An expert whose load is above so many times the mean sends tokens to others."""


@dataclass(frozen=True)
class ExpertShares:
    """What experts got of all choices of their layer's tokens: over all layers and experts.

    `mean` is 1 / experts where no choice was dropped, less by their share where some were.
    """

    least: float
    mean: float
    most: float


def spread(chosen: Tensor, experts: int) -> Tensor:
    """Sends choices beyond 1.5 × the mean load to the expert that has the least so far.

    `chosen` int64 [examples, tokens, top_k], distinct for a token; the same shape comes back. They arrive as
    in `places_at`. A token that already goes to that expert keeps its own choice.
    """
    examples, tokens, top_k = chosen.shape
    mean = tokens * top_k / experts
    limit = max(math.ceil(mean), math.floor(CROWDED * mean))
    arriving = chosen.transpose(1, 2).flatten(1)
    load = F.one_hot(arriving, experts).sum(1)
    over = _places(arriving, experts) >= limit
    # Free places by level and then by expert: the n-th is that of the n-th choice that has to go.
    levels = torch.arange(limit, device=chosen.device).view(1, -1, 1)
    free = (levels >= load.unsqueeze(1)).flatten(1).cumsum(1)
    found = torch.searchsorted(free, over.cumsum(1).clamp(min=1))
    others = (found % experts).view(examples, top_k, tokens).transpose(1, 2)
    over = over.view(examples, top_k, tokens).transpose(1, 2)
    taken = (others.unsqueeze(-1) == chosen.unsqueeze(-2)).any(-1)
    moved = torch.where(over & ~taken, others, chosen)
    # Of two choices of a token that would meet at one expert, the first goes there.
    same = (moved.unsqueeze(-1) == moved.unsqueeze(-2)).tril(-1).any(-1)
    return torch.where(same, chosen, moved)


def places_at(chosen: Tensor, experts: int) -> Tensor:
    """The place of each choice among those of its expert, from 0, in order of arrival.

    First choices of an example's tokens arrive before second ones, and each in the tokens' order (GShard,
    algorithm 1). `chosen` int64 [examples, tokens, top_k]; the same shape comes back.
    """
    examples, tokens, top_k = chosen.shape
    places = _places(chosen.transpose(1, 2).flatten(1), experts)
    return places.view(examples, top_k, tokens).transpose(1, 2)


def capacity_of(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """How many of an example's choices an expert takes (Fedus et al. 2022, equation 3), rounded up."""
    return math.ceil(factor * tokens * top_k / experts)


class Loaded(Protocol):
    """A layer of experts; `load` int64 [experts + 1] counts choices since it was taken, the dropped last."""

    load: Tensor | None


class ExpertLoads:
    """How a step's choices fell on the experts of each layer of a model, which this rank has whole."""

    def __init__(self, layers: Sequence[Loaded], experts: Sequence[int]) -> None:
        self._layers = layers
        self._experts = experts

    def take(self, device: torch.device) -> Tensor:
        """This rank's counts since the last call, float64, of each layer: its experts' and the dropped."""
        parts = []
        for layer, experts in zip(self._layers, self._experts, strict=True):
            load = layer.load
            parts.append(torch.zeros(experts + 1, device=device) if load is None else load)
            layer.load = None
        return torch.cat([torch.zeros(0, device=device), *parts]).double()

    def shares(self, counts: Sequence[float]) -> ExpertShares | None:
        """Of the counts of all ranks together; None where there are no experts, or nothing was counted."""
        shares: list[float] = []
        begin = 0
        for experts in self._experts:
            layer = counts[begin : begin + experts + 1]
            begin += experts + 1
            if total := sum(layer):
                shares += [count / total for count in layer[:experts]]
        if not shares:
            return None
        return ExpertShares(min(shares), sum(shares) / len(shares), max(shares))


def _places(arriving: Tensor, experts: int) -> Tensor:
    """`arriving` [examples, choices] in their order; each one's place at its expert."""
    seen = F.one_hot(arriving, experts).cumsum(1)
    return seen.gather(-1, arriving.unsqueeze(-1)).squeeze(-1) - 1
