"""MOON: model-contrastive learning holds representations near the global model's (Li et al. 2021)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    ClientAlgorithm,
    ClientRound,
    Composition,
    GradientWork,
    Sent,
)
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.passes import copy_with, without_statistics
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_LAST = "last"


class MoonTable(AlgorithmTable):
    """`[algorithm]` with name = "moon"."""

    mu: Finite = Field(1.0, gt=0, description="weight μ of the contrastive loss")
    temperature: Finite = Field(0.5, gt=0, description="τ of the contrastive loss")


class Moon(ClientAlgorithm):
    """Loss f + μ · mean(−log σ((cos(z, z_glob) − cos(z, z_prev))/τ)) (equations 3 to 5).

    z are the task's `features(model, batch)` [batch, …] under the client's model, z_glob under the model
    received, z_prev under the client's last one, which stays with it; on its first visit that is the model
    received, and the term's gradient is zero.
    """

    Table = MoonTable
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS, own_optimizers=True, schedule=True, task_method="features"
    )

    @override
    def after_gradient(self, work: GradientWork) -> None:
        assert isinstance(self.table, MoonTable)
        received, last = self._others(work)
        features = work.task.features
        with torch.no_grad():
            theirs = functional.cosine_similarity
            anchor, past = (features(model, work.batch).flatten(1) for model in (received, last))
        with without_statistics(work.module):
            own = features(work.module, work.batch).flatten(1)
        closer = theirs(own, anchor, dim=1) - theirs(own, past, dim=1)
        loss = -functional.logsigmoid(closer / self.table.temperature).mean()
        (self.table.mu * loss).backward()  # type: ignore[no-untyped-call]

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {}, {_LAST: round.vector + update})

    @staticmethod
    def _others(work: GradientWork) -> tuple[nn.Module, nn.Module]:
        """The models received and left last, as they are evaluated; made once a round."""
        round = work.round
        if "others" not in round.scratch:
            values = (round.vector, round.kept.get(_LAST, round.vector))
            made = tuple(copy_with(work.module, round.layout, each).eval() for each in values)
            round.scratch["others"] = made
        received, previous = round.scratch["others"]
        return received, previous
