"""Ditto: beside the global model each client trains one of its own, held near it (Li et al. 2021)."""

from __future__ import annotations

from typing import Any

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
    composition = Composition(levels=WHOLE_UPDATE_LEVELS)

    @override
    def after_gradient(self, work: GradientWork) -> None:
        seen: list[Any] = work.round.scratch.setdefault("batches", [])
        seen.append(work.batch)
        if "own" not in work.round.scratch:
            start = work.round.kept.get(_OWN, work.round.vector)
            own = copy_with(work.module, work.round.layout, start)
            work.round.scratch.update(own=own, task=work.task)

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        assert isinstance(self.table, DittoTable)
        own: nn.Module = round.scratch.pop("own")
        task, batches = round.scratch.pop("task"), round.scratch.pop("batches")
        rate = (
            round.rate
            / self.table.learning_rate
            * (self.table.personal_learning_rate or self.table.learning_rate)
        )
        anchor = copy_with(own, round.layout, round.vector)
        held = HeldSteps(trainable(own), trainable(anchor), self.table.pull, rate, round.step)
        for number in range(self.table.personal_steps or steps):
            held.take(task.loss(own, batches[number % len(batches)]))
        return Sent(update, {}, {_OWN: round.layout.flatten(own)})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        if _OWN in round.kept:
            put(module, round.layout, round.kept[_OWN])
