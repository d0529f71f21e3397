"""APFL: each client mixes the global model with one of its own (Deng et al. 2020)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    ClientAlgorithm,
    ClientRound,
    Composition,
    GradientWork,
    Sent,
)
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.passes import copy_with, put, trainable
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_OWN, _SHARE = "own", "share"


class ApflTable(AlgorithmTable):
    """`[algorithm]` with name = "apfl"."""

    share: Finite = Field(
        0.5, ge=0, le=1, description="α: how much of the mixture is the client's own, at first"
    )
    adaptive: bool = Field(False, description="whether a client learns its α")
    share_learning_rate: Finite | None = Field(None, gt=0, description="of α; default: learning_rate")


class Apfl(ClientAlgorithm):
    """Algorithm 1: w ← w − η ∇f(w) and v ← v − η α ∇f(v̄) at the mixture v̄ = α v + (1 − α) w, on the same
    batch.

    Where α adapts it does so before the first step of a round: α ← α − η ⟨v − w, ∇f(v̄)⟩ within [0, 1]
    (equation 10), and the step is taken at the mixture with the new α. v and α stay at the client; evaluated
    is α v + (1 − α) x.
    """

    Table = ApflTable
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS,
        momentum=False,
        weight_decay=False,
        reason="the own model takes plain steps at the mixture",
    )

    @override
    def before_gradient(self, work: GradientWork) -> None:
        """The own model's step, from the weights as they are before the global model's."""
        assert isinstance(self.table, ApflTable)
        table, round = self.table, work.round
        if "own" not in round.scratch:
            start = round.kept.get(_OWN, round.vector)
            own: nn.Module = copy_with(work.module, round.layout, start)
            share = float(round.kept.get(_SHARE, torch.tensor([table.share])))
            mixture = copy_with(own, round.layout, start)
            round.scratch.update(own=own, mixture=mixture, share=share)
        theirs, share = trainable(round.scratch["own"]), round.scratch["share"]
        at = _gradients_at_mixture(work, share)
        if table.adaptive and work.number == 1:
            pairs = zip(theirs, work.parameters, at, strict=True)
            with torch.no_grad():
                slope = sum(float(((mine - other) * g).sum()) for mine, other, g in pairs if g is not None)
            rate = table.share_learning_rate or round.rate
            round.scratch["share"] = share = min(1.0, max(0.0, share - rate * slope))
            at = _gradients_at_mixture(work, share)
        with torch.no_grad():
            for mine, gradient in zip(theirs, at, strict=True):
                if gradient is not None:
                    mine.sub_(gradient, alpha=round.rate * share)

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        own, share = round.scratch.pop("own"), round.scratch["share"]
        with torch.no_grad():
            for mine, mixed in zip(own.buffers(), round.scratch.pop("mixture").buffers(), strict=True):
                mine.copy_(mixed)  # The mixture's passes have moved the running statistics.
        kept = round.layout.flatten(own)
        return Sent(update, {}, {_OWN: kept, _SHARE: torch.tensor([share], dtype=torch.float64)})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        assert isinstance(self.table, ApflTable)
        if _OWN in round.kept:
            share = float(round.kept.get(_SHARE, torch.tensor([self.table.share])))
            put(module, round.layout, torch.lerp(round.vector, round.kept[_OWN], share))


def _gradients_at_mixture(work: GradientWork, share: float) -> list[Tensor | None]:
    """∇f(v̄) on the step's batch, one for each trained parameter; None for one without a part in the loss."""
    own, mixture = work.round.scratch["own"], work.round.scratch["mixture"]
    with torch.no_grad():
        mixed = torch._foreach_lerp([p.detach() for p in work.parameters], trainable(own), share)
        torch._foreach_copy_(trainable(mixture), list(mixed))
    mixture.zero_grad(set_to_none=True)
    work.task.loss(mixture, work.batch).backward()
    return [p.grad for p in trainable(mixture)]
