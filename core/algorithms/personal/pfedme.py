"""pFedMe: personal models as Moreau envelopes of the global one (Dinh et al. 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    ClientAlgorithm,
    ClientRound,
    Composition,
    GradientWork,
    Sent,
)
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.passes import copy_with, put, trainable
from roundtable.core.algorithms.personal.second_model import HeldSteps
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError
from roundtable.core.toml_tables import Finite

_OWN = "own"


class PFedMeTable(AlgorithmTable):
    """`[algorithm]` with name = "pfedme"; β of the paper is the server optimizer's learning rate."""

    pull: Finite = Field(gt=0, description="λ of the envelope; learning_rate · λ must be at most 2")
    inner_steps: int = Field(5, ge=1, description="steps on each batch towards the envelope's minimum")
    personal_learning_rate: Finite = Field(gt=0, description="of those steps")
    personal_weight_decay: Finite = Field(0.0, ge=0, description="of those steps; 0.001 in its authors' code")
    inner_start: Literal["own", "local"] = Field(
        "own",
        description="where they start: at the personal model of the batch before, a round's "
        "first at the model "
        "received; or at the local one",
    )


class PFedMe(ClientAlgorithm):
    """Algorithm 1: for each batch θ ≈ argmin f(θ) + λ/2 ‖θ − w‖², then w ← w − η λ (w − θ); θ stays at the
    client."""

    Table = PFedMeTable
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS,
        momentum=False,
        weight_decay=False,
        reason="its local step is the gradient of the envelope alone",
    )

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        assert isinstance(table, PFedMeTable)
        if table.learning_rate * table.pull > 2:
            raise ConfigError(
                f"algorithm: learning_rate · pull = {table.learning_rate * table.pull:g}: above "
                "2 the local steps diverge"
            )

    @override
    def before_gradient(self, work: GradientWork) -> Tensor:
        assert isinstance(self.table, PFedMeTable)
        table, round = self.table, work.round
        local: list[Tensor] = list(work.parameters)
        if "own" not in round.scratch:
            round.scratch["own"] = copy_with(work.module, round.layout, round.vector)
        own: nn.Module = round.scratch["own"]
        theta = trainable(own)
        if table.inner_start == "local":
            with torch.no_grad():
                torch._foreach_copy_(theta, local)
        plain = LocalStep(weight_decay=table.personal_weight_decay)
        held = HeldSteps(theta, local, table.pull, table.personal_learning_rate, plain)
        loss = torch.zeros(())
        for _ in range(table.inner_steps):
            loss = work.task.loss(own, work.batch)
            held.take(loss)
        for parameter, value in zip(local, theta, strict=True):
            parameter.grad = table.pull * (parameter.detach() - value.detach())
        return loss.detach()

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {}, {_OWN: round.layout.flatten(round.scratch.pop("own"))})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        if _OWN in round.kept:
            put(module, round.layout, round.kept[_OWN])
