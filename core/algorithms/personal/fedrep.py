"""FedRep: a client fits its own head to the shared base, then the base to it (Collins et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork
from roundtable.core.algorithms.personal.heads import HeadTable, head_of
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
    def phase(self, round: ClientRound, number: int) -> bool:
        """Whether the step is one of the head's."""
        assert isinstance(self.table, FedRepTable)
        return number <= self.table.head_steps

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        assert isinstance(self.table, FedRepTable)
        table, head = self.table, set(head_of(work.module, self.table))
        loss, every = work.gradients()
        pairs = zip(work.names, every, strict=True)
        moved = [gradient if (name in head) == work.phase else None for name, gradient in pairs]
        if work.phase and table.head_learning_rate is not None:
            share = table.head_learning_rate / table.learning_rate
            moved = [None if gradient is None else gradient * share for gradient in moved]
        return loss, moved
