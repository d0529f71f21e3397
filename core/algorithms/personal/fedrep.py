"""FedRep: a client fits its own head to the shared base, then the base to it (Collins et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition, GradientWork
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.personal.heads import HeadTable, head_of, without_gradients
from roundtable.core.toml_tables import Finite


class FedRepTable(HeadTable):
    """`[algorithm]` with name = "fedrep"."""

    head_steps: int = Field(ge=1, description="first steps of a round, which train the head alone")
    head_learning_rate: Finite | None = Field(
        None, gt=0, description="of those steps; default: learning_rate"
    )


class FedRep(ClientAlgorithm):
    """Algorithm 1: the head's steps with the base frozen, then the base's with the head frozen; the head
    stays."""

    Table = FedRepTable
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS, reason="what is frozen must not move by an optimizer's state"
    )

    @override
    def local_tensors(self, model: nn.Module) -> Sequence[str]:
        return head_of(model, self.table)

    @override
    def after_gradient(self, work: GradientWork) -> None:
        assert isinstance(self.table, FedRepTable)
        head = set(head_of(work.module, self.table))
        if work.number > self.table.head_steps:
            without_gradients(work.module, list(head))
            return
        base = [name for name, _ in work.module.named_parameters() if name not in head]
        without_gradients(work.module, base)
        if self.table.head_learning_rate is not None:
            for parameter in work.parameters:
                if parameter.grad is not None:
                    parameter.grad *= self.table.head_learning_rate / self.table.learning_rate
