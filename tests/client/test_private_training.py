"""Silos that make their updates private themselves: paid for first, and nothing exact beside the update."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundtable.client.silo_account import payment
from roundtable.client.training import LocalUpdate, train
from roundtable.core import Layout, Site, Task, parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import BudgetExceeded, PrivacyError
from roundtable.privacy.example_level import SiloAccount

TABLE = """
task = "t"
rounds = 2
[algorithm]
name = "fedprox"
mu = 0.1
batch_size = 8
steps = 3
learning_rate = {rate}
[privacy]
level = "{level}"
clip_norm = 1.0
delta = 1e-3
{more}
"""


class Points(Task):
    def __init__(self, norm: bool = False) -> None:
        self.norm = norm

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 200), *([nn.BatchNorm1d(200)] if self.norm else []), nn.Linear(200, 2)
        )

    def data(self, site: Site) -> tuple[tuple[Tensor, Tensor], None]:
        chance = torch.Generator().manual_seed(3)
        points = torch.randn(40, 4, generator=chance)
        return (points, (points.sum(1) > 0).long()), None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])


def job_of(level: str, more: str = "noise_multiplier = 1.0", rate: float = 0.1) -> JobConfig:
    return parse_job(TABLE.format(level=level, more=more, rate=rate))


def once(job: JobConfig, folder: Path, epsilon: float | None = None, norm: bool = False) -> LocalUpdate:
    task = Points(norm)
    torch.manual_seed(0)
    model = task.model()
    layout = Layout.of(model)
    data, _ = task.data(Site("alder"))
    pay = payment(folder, "job", 1, 1, epsilon, None)
    return train(task, model, data, job, layout, layout.flatten(model), round=1, client="alder", pay=pay)


def account(folder: Path, unit: str) -> SiloAccount:
    return SiloAccount.from_json((folder / f"{unit}.json").read_text())


@pytest.mark.parametrize(("level", "unit"), [("example", "example"), ("client_local", "client")])
def test_nothing_exact_leaves_and_work_done_again_is_charged_again(
    tmp_path: Path, level: str, unit: str
) -> None:
    first, again = once(job_of(level), tmp_path), once(job_of(level), tmp_path)
    assert not torch.equal(first.delta, again.delta), "noise in production is never drawn twice"
    assert (first.examples, first.metrics, math.isnan(first.loss)) == (1, {}, True)
    entries = account(tmp_path, unit).entries
    assert [entry.job for entry in entries] == ["job", "job (again)"]
    assert entries[0].charge.steps == (3 if level == "example" else 1)


def test_the_sampling_that_is_charged_is_the_silos_own(tmp_path: Path) -> None:
    once(job_of("example"), tmp_path)
    assert account(tmp_path, "example").entries[0].charge.rate == 8 / 40


def test_the_noise_of_a_silo_has_the_claimed_spread(tmp_path: Path) -> None:
    update = once(job_of("client_local", "noise_multiplier = 0.5", rate=1e-9), tmp_path)
    assert update.delta.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("more", "epsilon"), [("noise_multiplier = 1.0\nepsilon = 7.0", None), ("noise_multiplier = 1.0", 7.0)]
)
def test_a_round_beyond_the_budget_is_refused(tmp_path: Path, more: str, epsilon: float | None) -> None:
    job = job_of("client_local", more.replace("1.0", "1.5", 1))
    once(job, tmp_path, epsilon)
    before = (tmp_path / "client.json").read_text()
    with pytest.raises(BudgetExceeded, match="above its budget of 7"):
        once(job, tmp_path, epsilon)
    assert (tmp_path / "client.json").read_text() == before


def test_a_damaged_account_is_no_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text("{")
    with pytest.raises(PrivacyError, match="restore it from a backup"):
        once(job_of("client_local"), tmp_path)


def test_a_model_that_mixes_examples_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="GroupNorm"):
        once(job_of("example"), tmp_path, norm=True)
    assert not (tmp_path / "example.json").exists()


def test_without_an_account_nothing_is_trained() -> None:
    task = Points()
    model = task.model()
    layout = Layout.of(model)
    with pytest.raises(PrivacyError, match="without the protection"):
        train(
            task,
            model,
            task.data(Site("a"))[0],
            job_of("example"),
            layout,
            layout.flatten(model),
            round=1,
            client="a",
        )
