"""What a task's methods are told of their round is the same, and right, in every backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roundtable.core import JobConfig
from roundtable.core.algorithms.round_context import Context
from roundtable.simulation import simulate

HERE = Path(__file__).parent
NAME = "told"
SITES = {f"client-{index}" for index in range(4)}


def outcome(task: str, backend: str) -> tuple[Tensor, list[Mapping[str, Any]]]:
    job = JobConfig.model_validate(
        {
            "task": f"told_tasks.py:{task}",
            "name": NAME,
            "rounds": 2,
            "seed": 5,
            "algorithm": {"batch_size": 8, "epochs": 2, "learning_rate": 0.1},
            "simulation": {"clients": 4, "backend": backend, "workers": 2, "device": "cpu"},
        }
    )
    result = simulate(job, folder=HERE)
    assert result.status == "finished", result.reason
    return result.model.vector, [record.client_metrics for record in result.history.records]


@pytest.mark.parametrize("backend", ["sequential", "processes", "vectorised", "stacked"])
def test_an_evaluation_is_told_its_round_and_site(backend: str) -> None:
    _, rounds = outcome("ToldWhenMeasured", backend)
    for number, clients in enumerate(rounds, 1):
        assert set(clients) == SITES
        for site, metrics in clients.items():
            means = {name: total / count for name, (total, count) in metrics.items()}
            expected = Context(NAME, number, site, job_seed=5)
            assert means["of_round"] == number
            assert means["steps"] == 0
            assert means["stream"] == expected.seed("x") % 97
            assert means["site"] == int(site.removeprefix("client-"))


@pytest.mark.parametrize("backend", ["processes", "vectorised", "stacked"])
def test_training_is_told_the_same_by_every_backend(backend: str) -> None:
    assert torch.equal(outcome("Told", "sequential")[0], outcome("Told", backend)[0])
