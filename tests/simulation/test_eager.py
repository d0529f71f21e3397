"""Eager updates against the paper's algorithm written down plainly in float64, simulated and at silos."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import NAMES, agents, federation_of, run_job, silo
from torch import Tensor

from roundtable.core import JobConfig, load_task
from roundtable.core.algorithms.schedules import Schedule
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.engine import make_plan
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn
from roundtable.core import Task

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
    def forward(self, rows):
        return rows @ self.weight

class Toy(Task):
    def model(self):
        return Line()
    def data(self, site):
        generator = torch.Generator().manual_seed(int(site.options.get("seed", site.index)))
        rows = torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator)
        return rows, rows
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean() / 2
"""
RATE, STEPS, ROUNDS = 0.1, 3, 7
COSINE = {"name": "cosine", "rounds": 9, "warm_up": 2}


def moved_by(**server: Any) -> dict[str, Any]:
    return {"weighting": "uniform", "server_optimizer": server, "validation": {"norm_ratio": "off"}}


def job_of(**changes: Any) -> JobConfig:
    table = {
        "task": "toy",
        "rounds": ROUNDS,
        "algorithm": {"name": "eager", "steps": STEPS, "batch_size": 8, "learning_rate": RATE},
        "aggregation": moved_by(name="diloco", learning_rate=0.7, momentum=0.8),
        "evaluation": {"every": 0},
        "cohort": {"size": 3},
        "simulation": {"clients": 3},
    }
    return JobConfig.model_validate({**table, **changes})


def trained(start: Tensor, seed: int) -> Tensor:
    """The silo's change [6] of one round."""
    generator = torch.Generator().manual_seed(seed)
    rows, wanted = (
        torch.randn(8, 6, generator=generator).double(),
        torch.randn(8, generator=generator).double(),
    )
    own = start.clone()
    for _ in range(STEPS):
        own -= RATE * rows.T @ (rows @ own - wanted) / 8
    return own - start


def by_paper(start: Tensor, seeds: list[int], rate: float, momentum: float) -> Tensor:
    """The model of the true sums after ROUNDS, where each replica takes the outer step by its own fresh
    change and the others' of one round before, with weights and momentum of its own (Kale et al. 2025)."""
    count = len(seeds)
    own, speed = [start.double() for _ in seeds], [torch.zeros(6).double() for _ in seeds]
    before = [torch.zeros(6).double() for _ in seeds]
    model, velocity = start.double(), torch.zeros(6).double()
    for _ in range(ROUNDS):
        fresh = [trained(weights, seed) for weights, seed in zip(own, seeds, strict=True)]
        for m in range(count):
            eager = (fresh[m] + sum(before[j] for j in range(count) if j != m)) / count
            speed[m] = momentum * speed[m] + eager
            own[m] = own[m] + rate * (eager + momentum * speed[m])
        before, mean = fresh, torch.stack(fresh).mean(0)
        velocity = momentum * velocity + mean
        model = model + rate * (mean + momentum * velocity)
    return model


def by_hand(start: Tensor, cohorts: list[list[int]], momentum: float, factors: list[float]) -> Tensor:
    """The same where silos miss rounds and the outer rate changes: each begins with the global model that its
    last round was of and its own share in the step behind that, if it was in the round before."""
    model, velocity = start.double(), torch.zeros(6).double()
    begins, speed, last = {}, {}, {}
    for round, (cohort, factor) in enumerate(zip(cohorts, factors, strict=True), start=1):
        rate, changes = 0.7 * factor, []
        for site in cohort:
            change = trained(begins[site] if last.get(site) == round - 1 else model, site)
            changes.append(change)
            own = change / len(cohort)
            gone = momentum ** (round - last[site]) * speed[site] if site in last else 0.0
            speed[site] = gone + own
            begins[site] = model + rate * (own + momentum * speed[site])
            last[site] = round
        mean = torch.stack(changes).mean(0)
        velocity = momentum * velocity + mean
        model = model + rate * (mean + momentum * velocity)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TASK)
    return tmp_path


@pytest.mark.parametrize(("optimizer", "momentum"), [("diloco", 0.8), ("fedavg", 0.0)])
def test_it_is_the_algorithm_of_the_paper(folder: Path, optimizer: str, momentum: float) -> None:
    server = {"name": optimizer, "learning_rate": 0.7} | ({"momentum": momentum} if momentum else {})
    job = job_of(
        aggregation={**job_of().aggregation.model_dump(exclude_unset=True), "server_optimizer": server}
    )
    start = initial_model(job, load_task("toy.py", folder)).vector
    found = simulate(job, folder=folder).model.vector
    torch.testing.assert_close(
        found.double(), by_paper(start, [0, 1, 2], 0.7, momentum), rtol=1e-5, atol=1e-6
    )


def test_silos_that_miss_rounds_begin_with_the_global_model(folder: Path) -> None:
    aggregation = moved_by(name="diloco", learning_rate=0.7, momentum=0.8, schedule=COSINE)
    job = job_of(cohort={"size": 2}, aggregation=aggregation)
    start = initial_model(job, load_task("toy.py", folder)).vector
    found = simulate(job, folder=folder)
    cohorts = [[int(name.partition("-")[2]) for name in record.cohort] for record in found.history.records]
    assert len({tuple(sorted(cohort)) for cohort in cohorts}) > 1
    factors = [Schedule.of(COSINE).factor(round) for round in range(ROUNDS)]
    wanted = by_hand(start, cohorts, 0.8, factors)
    torch.testing.assert_close(found.model.vector.double(), wanted, rtol=1e-5, atol=1e-6)


def test_one_silo_alone_is_diloco(folder: Path) -> None:
    one = {"cohort": {"size": 1}, "simulation": {"clients": 1}}
    plain = {"name": "fedavg", "steps": STEPS, "batch_size": 8, "learning_rate": RATE}
    eager, diloco = (
        simulate(job_of(**one), folder=folder),
        simulate(job_of(algorithm=plain, **one), folder=folder),
    )
    torch.testing.assert_close(eager.model.vector, diloco.model.vector, rtol=1e-5, atol=1e-6)


async def test_silos_that_train_ahead_make_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = job_of(evaluation={"every": 1})
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, _, found = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert "batches ahead" in caplog.text
    wanted = by_paper(model.vector, [0, 1, 2], 0.7, 0.8)
    torch.testing.assert_close(found.vector.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ({"aggregation": {"weighting": "examples"}}, ConfigError, "weighting"),
        (
            {"aggregation": {"weighting": "uniform", "server_optimizer": {"name": "fedadam"}}},
            ConfigError,
            '"diloco" or "fedavg"',
        ),
        ({"aggregation": {"weighting": "uniform", "rule": "median"}}, ConfigError, "mean"),
        ({"cohort": {}}, ConfigError, "cohort.size and algorithm 'eager'"),
        ({"cohort": {"size": 2, "over_selection": 1.5}}, ConfigError, "over_selection"),
        ({"round": {"mode": "buffered", "buffer": 2}}, ConfigError, "buffered"),
        (
            {"privacy": {"level": "client", "clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}},
            PrivacyError,
            "before the sum is made",
        ),
        (
            {"privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 1.0}},
            PrivacyError,
            "secure_aggregation",
        ),
    ],
)
def test_what_is_not_exact_is_refused_before_round_1(
    table: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_plan(job_of(**table), 3)
