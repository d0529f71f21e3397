"""Algorithms whose personal model is the global one after some steps at the client.

Fine-tuning (Wang et al. 2019, "Federated Evaluation of On-device "
"Personalization"), FedBABU (Oh et al. 2022) and first-order
Per-FedAvg (Fallah et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork
from roundtable.core.algorithms.personal.heads import HeadTable, head_of
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite


class TuningTable(AlgorithmTable):
    """`[algorithm]` with name = "finetuning"."""

    tuning_steps: int = Field(ge=1, description="steps at the client before the model is evaluated there")
    tuning_learning_rate: Finite | None = Field(
        None, gt=0, description="of those steps; default: learning_rate"
    )


class FineTuning(ClientAlgorithm):
    """FedAvg; a client takes steps on its training data before it evaluates a copy of the global model."""

    Table = TuningTable
    composition = Composition(levels=WHOLE_UPDATE_LEVELS, own_optimizers=True, buffered=True)

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        assert isinstance(self.table, TuningTable)
        assert round.tune is not None
        rate = self.table.tuning_learning_rate or self.table.learning_rate
        round.tune(module, self.table.tuning_steps, rate)


class FedBabuTable(HeadTable, TuningTable):
    """`[algorithm]` with name = "fedbabu"."""


class FedBabu(FineTuning):
    """The head keeps its initial values, the same at all clients; the base is trained and averaged (Algorithm
    1).

    The whole model is tuned at the client before it is evaluated.
    """

    Table = FedBabuTable
    composition = Composition(levels=WHOLE_UPDATE_LEVELS)

    @override
    def local_tensors(self, model: nn.Module) -> Sequence[str]:
        return head_of(model, self.table)

    @override
    def resting(self, model: nn.Module) -> Sequence[str]:
        return head_of(model, self.table)


class PerFedAvgTable(AlgorithmTable):
    """`[algorithm]` with name = "perfedavg": learning_rate is the outer rate β."""

    inner_learning_rate: Finite = Field(gt=0, description="α of the step that adapts to a client")


class PerFedAvg(ClientAlgorithm):
    """First order (Algorithm 1): y ← y − β ∇f(y − α ∇f(y; b₁); b₂), with two batches a step; evaluated after
    one α step.

    A last batch without a second one is left out.
    """

    Table = PerFedAvgTable
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS,
        momentum=False,
        weight_decay=False,
        reason="a step takes two batches, and no optimizer's state may move between them",
    )
    looks_back = True

    @override
    def phase(self, round: ClientRound, number: int) -> bool:
        """Whether the step is the second of a pair."""
        return number % 2 == 0

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        assert isinstance(self.table, PerFedAvgTable)
        if not work.phase:
            return work.loss(), [None] * len(work.weights)
        _, inner = work.gradients(earlier=True)
        rate, pairs = self.table.inner_learning_rate, zip(work.weights, inner, strict=True)
        return work.gradients([weight if g is None else weight - g * rate for weight, g in pairs])

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        assert isinstance(self.table, PerFedAvgTable)
        assert round.tune is not None
        round.tune(module, 1, self.table.inner_learning_rate)
