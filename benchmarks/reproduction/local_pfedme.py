"""pFedMe whose clients are tested with w after their local rounds, as its authors' code tests them."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientRound, Sent
from roundtable.core.algorithms.passes import put
from roundtable.core.algorithms.personal.pfedme import PFedMe


class LocalPFedMe(PFedMe):
    """Trains as pFedMe does. Beside θ a client keeps w, which is what is evaluated there."""

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        sent = super().end(round, update, steps)
        return Sent(sent.update, sent.up, {**sent.kept, "local": round.vector + update})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        if "local" in round.kept:
            put(module, round.layout, round.kept["local"])
