"""Per-FedAvg whose clients are tested after two more steps, as pFedMe's authors test it."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientRound
from roundtable.core.algorithms.personal.tuned_models import PerFedAvg, PerFedAvgTable


class AdaptedPerFedAvg(PerFedAvg):
    """Trains as Per-FedAvg does. Before a test a client takes one step at the inner rate, and from there one
    at the outer (`train_one_step` of their userperavg.py), where the paper has the first alone.
    """

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        assert isinstance(self.table, PerFedAvgTable)
        assert round.tune is not None
        round.tune(module, 1, self.table.inner_learning_rate)
        round.tune(module, 1, self.table.learning_rate)
