"""MOON: model-contrastive learning holds representations near the global model's (Li et al. 2021)."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition, Sent
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork, Held, sums
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_RECEIVED, _LAST = "received", "last"


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
    keeps = "the model that its last round ended with"
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS, own_optimizers=True, schedule=True, task_method="features"
    )

    @override
    def holds(self, round: ClientRound) -> Held:
        return {_RECEIVED: round.vector, _LAST: round.kept.get(_LAST, round.vector)}

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        table = self.table
        assert isinstance(table, MoonTable)

        def features(model: nn.Module, batch: Any) -> Tensor:
            found: Tensor = work.task.features(model, batch)
            return found.flatten(1)

        loss, plain = work.gradients()
        anchor, past = (work.evaluated(name, features) for name in (_RECEIVED, _LAST))

        def contrast(model: nn.Module, batch: Any) -> Tensor:
            own, alike = features(model, batch), functional.cosine_similarity
            closer = alike(own, anchor, dim=1) - alike(own, past, dim=1)
            return table.mu * -functional.logsigmoid(closer / table.temperature).mean()

        return loss, sums(plain, work.gradients(of=contrast, statistics=False)[1])

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {}, {_LAST: round.vector + update})
