"""APFL: each client mixes the global model with one of its own (Deng et al. 2020)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition, Sent
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork, Held
from roundtable.core.algorithms.passes import put
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_OWN, _SHARE, _RATE, _SHARE_RATE = "own", "share", "rate", "share_rate"


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
    keeps = "its own model and its share"
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS,
        momentum=False,
        weight_decay=False,
        reason="the own model takes plain steps at the mixture",
    )

    @override
    def holds(self, round: ClientRound) -> Held:
        assert isinstance(self.table, ApflTable)
        rates = {_RATE: round.rate, _SHARE_RATE: self.table.share_learning_rate or round.rate}
        return {
            _OWN: round.kept.get(_OWN, round.vector),
            _SHARE: self._share(round),
            **{name: torch.tensor(rate) for name, rate in rates.items()},
        }

    @override
    def phase(self, round: ClientRound, number: int) -> bool:
        """Whether α adapts in the step."""
        assert isinstance(self.table, ApflTable)
        return self.table.adaptive and number == 1

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        """The own model's step, from the weights as they are before the global model's."""
        own, share = work.held(_OWN), work.figure(_SHARE)
        slopes = self._at_mixture(work)
        if work.phase:
            trios = zip(own, work.weights, slopes, strict=True)
            slope = torch.stack([((v - w) * g).sum() for v, w, g in trios if g is not None]).sum()
            share.copy_((share - work.figure(_SHARE_RATE) * slope).clamp(0.0, 1.0))
            slopes = self._at_mixture(work)
        rate = work.figure(_RATE) * share
        for mine, gradient in zip(own, slopes, strict=True):
            if gradient is not None:
                mine.sub_(gradient * rate)
        return work.gradients()

    @staticmethod
    def _at_mixture(work: GradientWork) -> Gradients:
        """∇f(v̄) on the step's batch; its passes move the own model's running statistics."""
        share, pairs = work.figure(_SHARE), zip(work.held(_OWN), work.weights, strict=True)
        return work.gradients([other + (mine - other) * share for mine, other in pairs], held=_OWN)[1]

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {}, {name: round.scratch[name] for name in (_OWN, _SHARE)})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        if _OWN in round.kept:
            put(module, round.layout, torch.lerp(round.vector, round.kept[_OWN], float(self._share(round))))

    def _share(self, round: ClientRound) -> Tensor:
        assert isinstance(self.table, ApflTable)
        return round.kept.get(_SHARE, torch.tensor(self.table.share))
