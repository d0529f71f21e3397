"""FedProx where stragglers do less (Li et al. 2020, section 5.2): a share of the clients stops early."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork, Held
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite


class PartialProxTable(AlgorithmTable):
    """`[algorithm]` of this file."""

    mu: Finite = Field(ge=0, description="of the proximal term")
    stragglers: Finite = Field(ge=0, le=1, description="how probable it is that a client stops early")


class PartialProx(ClientAlgorithm):
    """g + μ (y − x) until the client stops: after all its epochs, or as a straggler after fewer.

    Each client is a straggler by chance; the authors draw exactly so many of a round's.
    """

    Table = PartialProxTable
    composition = Composition(
        momentum=False, weight_decay=False, reason="a step after the last moves nothing"
    )

    @override
    def begin(self, round: ClientRound) -> None:
        assert isinstance(self.table, PartialProxTable)
        steps, epochs = round.context.steps, self.table.passes
        assert steps is not None
        draws = round.context.generator("stragglers")
        early = float(torch.rand((), generator=draws)) < self.table.stragglers
        done = int(torch.randint(1, epochs, (), generator=draws)) if early and epochs > 1 else epochs
        round.scratch["last"] = steps * done // epochs

    @override
    def holds(self, round: ClientRound) -> Held:
        return {"start": round.vector}

    @override
    def phase(self, round: ClientRound, number: int) -> bool:
        """Whether the client still trains."""
        return number <= int(round.scratch["last"])

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        assert isinstance(self.table, PartialProxTable)
        if not work.phase:
            # Without a gradient a step leaves the weights as they are.
            return torch.zeros(()), [None] * len(work.weights)
        loss, found = work.gradients()
        trios = zip(found, work.weights, work.held("start"), strict=True)
        return loss, [g if g is None else g + (y - x) * self.table.mu for g, y, x in trios]
