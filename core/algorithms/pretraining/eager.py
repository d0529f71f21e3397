"""Eager updates: a silo goes on with its own change and the others' of one round before it (Kale et al.)."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import BEGINS, ENDS, ClientAlgorithm, ClientRound, Composition, Sent

_BEGINS, _MOMENTUM, _ROUND = "begins", "momentum", "round"


class Eager(ClientAlgorithm):
    """DiLoCo with eager updates (Kale et al. 2025): silo m of M ends round t with the outer gradient
    g̃ₘ(t) = gₘ(t)/M + Σⱼ≠ₘ gⱼ(t − 1)/M, takes the outer step by it from its own weights with a momentum of its
    own, and begins round t + 1 there.

    The outer step is linear in its gradients, so that those weights are x(t) + η (Δₘ + β vₘ), with
    Δₘ = −gₘ(t)/M and vₘ ← β vₘ + Δₘ: the global model x(t) that round t is of, which has all changes up to
    round t − 1, and the share that the silo itself has in the outer step that is to come. So the silo keeps
    its own momentum alone, the server's model is that of true sums, and where everybody's change were the
    silo's own both would be DiLoCo. In rounds that a silo misses its share of the momentum decays as the
    server's does, and it begins with the global model.
    """

    keeps = "the weights that it begins its next round with"
    composition = Composition(
        weightings=frozenset({"uniform"}),
        own_optimizers=True,
        schedule=True,
        masked=False,
        averaged_buffers=False,
        rules="mean",
        outer_step=True,
        reason="a silo takes its own share in the server's step before the sum is made, which masks, bounds "
        "and other weights would make another one",
    )

    @override
    def begins(self, round: ClientRound) -> Tensor:
        """Its own weights, for which the round's model need not be there yet."""
        return round.kept[_BEGINS] if _away(round) == 1 else round.vector

    @override
    def goes_ahead(self) -> bool:
        return True

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        ends, outer = round.scratch[ENDS], round.outer
        assert outer is not None
        change = torch.sub(ends, round.scratch[BEGINS], out=update)
        own = momentum = change * outer.share
        if _MOMENTUM in round.kept:
            momentum = torch.add(own, round.kept[_MOMENTUM], alpha=outer.momentum ** _away(round))
        step = torch.mul(momentum, outer.momentum, out=ends).add_(own)
        begins = torch.add(round.vector, step, alpha=outer.rate, out=step)
        kept = {_BEGINS: begins, _MOMENTUM: momentum, _ROUND: torch.tensor(round.context.round)}
        return Sent(change, {}, kept)


def _away(round: ClientRound) -> int:
    """Rounds since the silo's last one, 1 where that was the one before; 0 before its first."""
    return round.context.round - int(round.kept[_ROUND]) if _ROUND in round.kept else 0
