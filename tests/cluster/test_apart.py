"""Replicas that train apart: DiLoCo as one process does it, across restarts and other numbers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_apart import apart_cases, diloco, go_on_as
from cluster_cases import Case
from cluster_plans import case, plan
from cluster_silo import ALGORITHM, Silo, watched
from ranks import run_ranks

from roundtable.core import load_task
from roundtable.core.initial_model import initial_model
from roundtable.core.task import Site, initial_state

OUTER = {"local_steps": 3, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
STEPS = {"steps": 8}
TWO = [
    # The last batch of an epoch has one example: the second replica has none of it.
    case("ddp", plan("ddp", dp=2, **OUTER), {"steps": 8, "batch_size": 9}),
    case("zero3", plan("zero3", dp=2, **OUTER), STEPS),
    case("local sgd", plan("ddp", dp=2, local_steps=3), STEPS),
]
FOUR = [
    case("shards", plan("zero2", dp=2, fsdp=2, **OUTER), STEPS),
    case("four replicas", plan("ddp", micro=1, dp=4, **OUTER), STEPS),
    case("tensors", plan("zero2", dp=2, tp=2, **OUTER), STEPS),
]


def check(found: list[dict[str, Any]], cases: list[Case]) -> None:
    for each in cases:
        for results in found:
            result = results[each.name]
            # Between meetings the replicas differ, or nothing here is shown.
            assert result["differ"] > 1e-6, (each.name, result)
            assert max(result["whole"], result["again"]) < 1e-10, (each.name, result)


def test_replicas_that_meet_equal_one_process_across_a_restart(tmp_path: Path) -> None:
    check(run_ranks(apart_cases, 2, TWO[:1], tmp_path), TWO[:1])


@pytest.mark.slow
def test_all_ways_to_meet_equal_one_process(tmp_path: Path) -> None:
    check(run_ranks(apart_cases, 2, TWO[1:], tmp_path), TWO[1:])
    check(run_ranks(apart_cases, 4, FOUR, tmp_path), FOUR)


@pytest.mark.slow
def test_other_numbers_of_replicas_go_on(tmp_path: Path) -> None:
    run_ranks(apart_cases, 2, TWO[:1], tmp_path)
    saved = tmp_path / TWO[0].name
    assert run_ranks(go_on_as, 4, FOUR[1], saved) == [0.0] * 4
    together = case("together", plan("ddp", dp=2), STEPS)
    assert run_ranks(go_on_as, 2, together, saved) == [0.0] * 2


@pytest.mark.slow
async def test_a_rank_that_dies_between_meetings_changes_nothing(tmp_path: Path) -> None:
    strategy = {"data_parallel": "ddp", "dp": 2, **OUTER}
    table = {"timeout": 20.0, "checkpoint_steps": 2, "strategy": strategy}
    silo = Silo(tmp_path, trouble="kill", call=6, table=table)
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
    assert (tmp_path / "mark").exists()
    task: Any = load_task("toy.py", tmp_path)
    data, _ = task.data(Site("alder", options={}))
    model: Any = initial_state(task, silo.job.seed)
    start = initial_model(silo.job, task).vector

    def inner(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=ALGORITHM["learning_rate"], momentum=ALGORITHM["momentum"])

    diloco(task.loss, model, data, silo.job, inner, (2, 3, 0.7, 0.9), "alder")
    expected = silo.model.layout.flatten(model) - start
    assert torch.allclose(silo.update(), expected, atol=1e-5)
