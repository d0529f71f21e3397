"""Private rounds on the ranks of one process group, beside the same round in one process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cluster_models import Language
from torch import Tensor, nn

from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import Execution, LocalWork, Stopped
from roundtable.client.training.silo_account import Protection
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import prepare_update, write_deltas
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.train.private_rounds import RoundCharge, fit_examples_privately, noise_on_parts
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, Wishes
from roundtable.core import JobConfig, Layout
from roundtable.core.privacy_table import NoPrivacy, Private
from roundtable.core.task import Site, initial_state
from roundtable.privacy import Charge, NoiseSource, SeededNoise
from roundtable.privacy.example_level import secure_sources


@dataclass(frozen=True)
class PrivateCase:
    """A strategy and a job's `[privacy]` table."""

    strategy: Strategy
    privacy: dict[str, Any]

    def job(self) -> JobConfig:
        """SGD without momentum, three steps."""
        algorithm = {"steps": 3, "batch_size": 8, "learning_rate": 0.5}
        table = {"task": "t", "seed": 7, "algorithm": algorithm, "privacy": self.privacy}
        return JobConfig.model_validate(table)


def seeded(purpose: str) -> NoiseSource:
    """The same noise every time."""
    return SeededNoise(5, purpose)


def one_process(case: PrivateCase, sources: Any = seeded, plain: bool = False) -> Tensor:
    """The update of a single process; `plain`: without privacy."""
    task, job = Language(dtype=torch.float64), case.job()
    if plain:
        job = job.model_copy(update={"privacy": NoPrivacy()})
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = task.data(Site("silo"))
    protection = Protection(lambda privacy, charge: None, sources, "first")
    execution = Execution() if plain else Execution(protection=protection)
    return train(task, model, data, LocalWork(job, layout, start, 1, "silo"), execution).delta


def private_round(rank: int, case: PrivateCase, folder: Path, same: bool) -> dict[str, Any]:
    """What a round left: the update's file, and the charges that this rank was asked for and paid."""
    task, job = Language(dtype=torch.float64), case.job()
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    trainer = RankTrainer(
        task, job, layout, case.strategy, Meshes(case.strategy.mesh, "cpu"), torch.device("cpu"), "silo"
    )
    trainer.mode = "first"
    trainer.load(start, {})
    data, _ = task.data(Site("silo"))
    asked: list[Charge] = []
    paid: list[Charge] = []

    def note(to: list[Charge]) -> Any:
        def pay(privacy: Private, charge: Charge) -> None:
            to.append(charge)

        return pay

    round_charge, sources = RoundCharge(note(asked), note(paid)), seeded if same else secure_sources
    change = None
    if case.privacy["level"] == "example":
        steps: list[int] = []
        fit_examples_privately(
            trainer, data, 1, round_charge, lambda report: steps.append(report.step), sources=sources
        )
        assert steps == [1, 2, 3]
    else:
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
        change = noise_on_parts(trainer, start, round_charge, sources)
    path = folder / "update"
    if rank == 0:
        prepare_update(path, "float32", layout)
    group = dist.group.WORLD
    assert group is not None
    round_charge.settle(group)
    write_deltas(path, "float32", trainer.replica.tensors(), trainer.places, start, trainer.meshes, change)
    dist.barrier()
    return {"asked": [one.to_json() for one in asked], "paid": [one.to_json() for one in paid]}


def withdrawn_work(rank: int, case: PrivateCase, step: int) -> tuple[list[int], int, int]:
    """Steps taken before the first rank's wish at this step, batches evaluated before it, and payments."""
    task, job = Language(dtype=torch.float64), case.job()
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    trainer = RankTrainer(
        task, job, layout, case.strategy, Meshes(case.strategy.mesh, "cpu"), torch.device("cpu"), "silo"
    )
    trainer.mode = "first"
    trainer.load(layout.flatten(model).clone(), {})
    data, test = task.data(Site("silo"))
    steps: list[int] = []
    wished = iter(number >= step for number in range(1, 100))
    paid: list[Charge] = []
    charge = RoundCharge(lambda privacy, charge: None, lambda privacy, charge: paid.append(charge))
    with suppress(Stopped):
        fit_examples_privately(
            trainer, data, 1, charge, lambda report: steps.append(report.step), Wishes(lambda: next(wished))
        )
    wished = iter(number >= step for number in range(1, 100))
    evaluated: list[int] = []
    loss = trainer.task.loss

    def counted(model: nn.Module, batch: Any) -> Tensor:
        evaluated.append(1)
        return loss(model, batch)

    with suppress(Stopped), patch.object(trainer.task, "loss", counted):
        trainer.evaluate(test, 4, partial(Wishes(lambda: next(wished)).obey, trainer.device))
    return steps, len(evaluated), len(paid)


def written(folder: Path) -> Tensor:
    """The update's file."""
    path = folder / "update"
    return torch.from_file(str(path), size=path.stat().st_size // 4)


__all__ = ["PrivateCase", "one_process", "private_round", "seeded", "withdrawn_work", "written"]
