"""Ditto: beside the global model each client trains one of its own, held near it (Li et al. 2021)."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    SECOND,
    ClientAlgorithm,
    ClientRound,
    Composition,
    SecondModel,
    Sent,
)
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.passes import put
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_OWN = "own"


class DittoTable(AlgorithmTable):
    """`[algorithm]` with name = "ditto"."""

    pull: Finite = Field(ge=0, description="λ, which holds a client's own model near the global one")
    personal_steps: int | None = Field(
        None, ge=1, description="steps of the own model a round; default: as many as the global model's"
    )
    personal_learning_rate: Finite | None = Field(None, gt=0, description="of those; default: learning_rate")


class Ditto(ClientAlgorithm):
    """Algorithm 1: v_i ← v_i − η (∇f_i(v_i) + λ (v_i − x)), with x as it was received; v_i stays at the
    client.

    The own model sees the round's batches from the first, in a circle, with the job's momentum and decay.
    """

    Table = DittoTable
    keeps = "its own model"
    composition = Composition(levels=WHOLE_UPDATE_LEVELS, local_parameters=False)

    @override
    def second(self, round: ClientRound) -> SecondModel:
        """From v_i, with λ (v − x) as a pull λ (v − v_i) towards its start and the constant λ (v_i − x)."""
        table = self.table
        assert isinstance(table, DittoTable)
        start = round.kept.get(_OWN, round.vector)
        rate = round.rate / table.learning_rate * (table.personal_learning_rate or table.learning_rate)
        step = replace(round.step, pull=table.pull, corrected=True)
        constant = round.on_trained(start - round.vector).mul_(table.pull)
        return SecondModel(start, step, rate, constant, table.personal_steps)

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {}, {_OWN: round.scratch.pop(SECOND)})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        if _OWN in round.kept:
            put(module, round.layout, round.kept[_OWN])
