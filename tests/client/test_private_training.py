"""Silos that make their updates private themselves: paid for first, and nothing exact beside the update."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundtable.client.training.local_training import LocalUpdate, train
from roundtable.client.training.local_work import Execution, LocalWork, Stopped
from roundtable.client.training.silo_account import Protection, payment
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.core import ArrayTask, Layout, Site, Task, load_task, parse_job, save_model
from roundtable.core.algorithms.personal.ditto import DittoTable
from roundtable.core.config import JobConfig
from roundtable.core.errors import BudgetExceeded, PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.privacy_table import ClientLocalLevel, NoPrivacy
from roundtable.core.task import initial_state
from roundtable.privacy import local_gaussian_charge
from roundtable.privacy.example_level import SiloAccount, probe

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


POINTS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from roundtable.core import Task

class Points(Task):
    def model(self):
        return nn.Linear(4, 2)
    def data(self, site):
        points = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
        data = points, (points.sum(1) > 0).long()
        return data, data
    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])
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
    protection = Protection(payment(folder, "job", 1, 1, epsilon, None))
    return train(
        task,
        model,
        data,
        LocalWork(job, layout, layout.flatten(model), 1, "alder"),
        Execution(protection=protection),
    )


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


class Averages(ArrayTask):
    """NumPy alone: no gradients."""

    def weights(self) -> dict[str, np.ndarray]:
        return {"w": np.zeros(600, np.float32)}

    def data(self, site: Site) -> list[float]:
        return [1.0, 2.0]

    def fit(self, arrays, data, options):  # type: ignore[no-untyped-def]
        return {"w": arrays["w"] + 1.0}, len(data), {"loss": 0.5}

    def evaluate(self, arrays, data):  # type: ignore[no-untyped-def]
        return {}


def fit_arrays(level: str, folder: Path) -> LocalUpdate:
    task = Averages()
    model = initial_state(task, 0)
    layout = Layout.of(model)
    protection = Protection(payment(folder, "job", 1, 1, None, None))
    data, job = task.data(Site("alder")), job_of(level)
    vector = torch.zeros(layout.size)
    return train(
        task, model, data, LocalWork(job, layout, vector, 1, "alder"), Execution(protection=protection)
    )


def test_an_array_task_gets_the_silos_noise_on_its_clipped_update(tmp_path: Path) -> None:
    update = fit_arrays("client_local", tmp_path)
    assert (update.examples, update.metrics) == (1, {})
    assert update.delta.std().item() == pytest.approx(1.0, rel=0.15)
    assert abs(update.delta.mean().item() - 600**-0.5) < 0.15, "clipped from 24.5 to a norm of 1"
    assert len(account(tmp_path, "client").entries) == 1


def test_an_array_task_cannot_promise_privacy_of_records(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="gradient of every example, and an ArrayTask gives none"):
        fit_arrays("example", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_way_to_gradients_is_found_once_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rounds are given the mode that the first one chose: they check it and time nothing."""
    timed: list[str] = []
    honest = probe._time_two_steps

    def count(candidate, *rest):  # type: ignore[no-untyped-def]
        timed.append(candidate.name)
        return honest(candidate, *rest)

    monkeypatch.setattr(probe, "_time_two_steps", count)
    monkeypatch.setattr(probe, "_SHORT_STEP", 0.0)
    (tmp_path / "points.py").write_text(POINTS)
    job = job_of("example").model_copy(update={"task": JobTaskTable(name="points")})
    task = load_task("points.py", tmp_path)
    model = initial_model(job, task)
    save_model(tmp_path / "model", model)
    shop = Executor(Settings("alder", str(tmp_path), str(tmp_path / "jobs"), "cpu", 1, {}))
    for round in (1, 2):
        order = Order(
            "job", round, "train", job.to_json(), "points.py", str(tmp_path / "model"),
            model.layout.fingerprint, str(tmp_path / f"update-{round}"),
        )  # fmt: skip
        shop.train(order, lambda done, total, loss: None)
        assert len(timed) == len(set(timed)) > 1
    assert len(account(tmp_path / "privacy", "example").entries) == 2


@pytest.mark.parametrize("work", ["none", "example", "evaluate", "ditto"])
def test_work_is_asked_before_each_batch_whether_it_goes_on(tmp_path: Path, work: str) -> None:
    """A stopped private step stays charged: else it could be timed for nothing, again and again."""
    (tmp_path / "points.py").write_text(POINTS)
    job = job_of("example").model_copy(update={"task": JobTaskTable(name="points")})
    if work != "example":
        evaluation = job.evaluation.model_copy(update={"batch_size": 8})
        job = job.model_copy(update={"privacy": NoPrivacy(), "evaluation": evaluation})
    if work == "ditto":
        own = DittoTable(
            name="ditto", pull=0.1, **job.algorithm.model_dump(include={"batch_size", "epochs", "steps"})
        )
        job = job.model_copy(update={"algorithm": own})
    model = initial_model(job, load_task("points.py", tmp_path))
    save_model(tmp_path / "model", model)
    shop = Executor(Settings("alder", str(tmp_path), str(tmp_path / "jobs"), "cpu", 1, {}))
    order = Order(
        "job", 1, "train", job.to_json(), "points.py", str(tmp_path / "model"),
        model.layout.fingerprint, str(tmp_path / "update"),
    )  # fmt: skip
    asked: list[int] = []

    def before() -> None:
        asked.append(len(asked))
        if stopping and len(asked) == 2:
            raise Stopped

    for stopping in (True, False):
        asked.clear()
        with pytest.raises(Stopped) if stopping else nullcontext():
            if work == "evaluate":
                shop.evaluate(order, before)
            else:
                shop.train(order, lambda done, total, loss: None, before)
        assert (tmp_path / "update").exists() == (not stopping and work != "evaluate")
        assert len(asked) == (2 if stopping else {"evaluate": 5, "ditto": 6}.get(work, 3))
        if work == "example":
            assert len(account(tmp_path / "privacy", "example").entries) == (1 if stopping else 2)


def test_without_an_account_nothing_is_trained() -> None:
    task = Points()
    model = task.model()
    layout = Layout.of(model)
    with pytest.raises(PrivacyError, match="without the protection"):
        train(
            task,
            model,
            task.data(Site("a"))[0],
            LocalWork(job_of("example"), layout, layout.flatten(model), 1, "a"),
        )


def test_charges_of_two_processes_are_all_in_the_account(tmp_path: Path) -> None:
    """The agent charges masked sums while its training process charges updates."""
    wanted = parse_job(
        'task = "t"\n[privacy]\nlevel = "client_local"\nclip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 1.0'
    ).privacy
    assert isinstance(wanted, ClientLocalLevel)

    def charge(job: str) -> None:
        for round in range(1, 21):
            payment(tmp_path, job, round, 1, None, None)(wanted, local_gaussian_charge(1.0))

    with ThreadPoolExecutor() as pool:
        list(pool.map(charge, ["masked", "noisy"]))
    assert len(SiloAccount.from_json((tmp_path / "client.json").read_text()).entries) == 40
