"""Parts of a batch give the batch's gradient or are refused; an agent short of memory trains in parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_silo import Silo
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.client.failures import WorkFailed
from roundtable.client.training.batches import Batch
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.client.training.micro_batches import CannotSplit, check_splittable, parts
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core import JobConfig, Layout
from roundtable.core.privacy_table import privacy_from
from roundtable.core.task import Site, Task

GENERATOR = torch.Generator().manual_seed(5)
X, Y = torch.randn(37, 4, generator=GENERATOR), torch.randint(3, (37,), generator=GENERATOR)


class Net(Task):
    """Three classes; `layer` comes first."""

    def __init__(self, layer: Callable[[], nn.Module] = nn.Identity) -> None:
        self._layer = layer

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(self._layer(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def data(self, site: Site) -> Any:
        return (X.double(), Y), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Summed(Net):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def job(**algorithm: Any) -> JobConfig:
    table = {"batch_size": 16, "epochs": 2, "learning_rate": 0.3, "momentum": 0.9, **algorithm}
    return JobConfig.model_validate({"task": "t", "seed": 4, "algorithm": table})


def trained(task: Task, settings: JobConfig, size: int | None) -> Any:
    model = task.model()
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = task.data(Site("s"))
    return train(task, model, data, LocalWork(settings, layout, start, 1, "s"), Execution(micro_batch=size))


@pytest.mark.parametrize("size", [1, 3, 8, 16, 100])
@pytest.mark.parametrize(
    "algorithm", [{}, {"name": "fedprox", "mu": 0.1}, {"max_gradient_norm": 0.5}, {"batch_size": 10}]
)
def test_training_in_parts_is_the_same_training(size: int, algorithm: dict[str, Any]) -> None:
    whole = trained(Net(), job(**algorithm), None)
    inside = trained(Net(), job(**algorithm), size)
    torch.testing.assert_close(inside.delta, whole.delta, rtol=1e-5, atol=1e-7)
    assert (inside.steps, inside.examples) == (whole.steps, whole.examples)
    assert inside.loss == pytest.approx(whole.loss, rel=1e-9)


def test_what_looks_at_the_whole_batch_is_refused() -> None:
    with pytest.raises(CannotSplit, match=r"layer '0' \(BatchNorm1d\) takes statistics over the whole batch"):
        trained(Net(lambda: nn.BatchNorm1d(4)), job(), 4)
    assert trained(Net(lambda: nn.LayerNorm(4)), job(), 4).steps == 6


def test_a_loss_that_is_no_mean_is_refused_and_the_model_trains_on() -> None:
    task, model = Summed(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double()
    model[0].eval()
    with pytest.raises(CannotSplit, match=r"Summed.loss\(\) must be the mean over the batch"):
        check_splittable(task, model, Batch(1, 16, (X[:16].double(), Y[:16])), 4)
    check_splittable(Net(), model, Batch(1, 16, (X[:16].double(), Y[:16])), 4)
    assert [layer.training for layer in model] == [False, True]


def test_batches_of_any_form_are_cut_by_examples() -> None:
    data = {"x": torch.arange(5), "more": [torch.arange(10).view(5, 2), ("a", "b", "c", "d", "e")]}
    cut = list(parts(data, 5, 2))
    assert [count for _, count in cut] == [2, 2, 1]
    assert [part["more"][1] for part, _ in cut] == [("a", "b"), ("c", "d"), ("e",)]
    assert torch.cat([part["more"][0] for part, _ in cut]).tolist() == torch.arange(10).view(5, 2).tolist()
    for odd in (torch.tensor(3.0), torch.arange(4), 7):
        with pytest.raises(CannotSplit, match="cannot be cut by examples"):
            list(parts((torch.arange(5), odd), 5, 2))


async def until_done(silo: Any, round: int, phase: str = "train") -> Any:
    """Orders a step; its failure, or None."""
    coordinator = silo.coordinator
    coordinator.say(instruction=silo.instruction(round, phase=phase))
    key = ("job-1", round, 1, "train")
    failed = asyncio.create_task(coordinator.hear("failure"))
    done = asyncio.create_task(
        coordinator.hear("evaluated")
        if phase == "evaluate"
        else coordinator.until(lambda: key in coordinator.receipts)
    )
    await asyncio.wait([failed, done], return_when=asyncio.FIRST_COMPLETED)
    for task in (failed, done):
        task.cancel()
    return failed.result() if failed.done() and not failed.cancelled() else None


def troubles(silo: Any) -> list[Any]:
    return [said.trouble for said in silo.coordinator.heard if said.HasField("trouble")]


async def test_an_agent_short_of_memory_trains_in_parts_and_remembers(silo) -> None:
    async with silo.agent():
        assert await until_done(silo, 1) is None
        silo.play("more than 2")
        assert await until_done(silo, 2) is None
        told = troubles(silo)
        assert [each.kind for each in told] == ["out_of_memory"] * 2
        assert "ran out of memory" in told[0].detail
        assert [each.action for each in told] == [
            f"reduced the batch size: no more than {count} examples in memory at once, from now on"
            for count in (4, 2)
        ]
        torch.testing.assert_close(silo.delta(2), silo.expected(2), rtol=1e-5, atol=1e-7)
        assert await until_done(silo, 3) is None
        assert len(troubles(silo)) == 2
        silo.play("more than 16")
        assert await until_done(silo, 3, "evaluate") is None
        assert [each.step.phase for each in troubles(silo)[2:]] == ["evaluate"] * 2
        silo.play("memory")
        failure = await until_done(silo, 4)
        assert (failure.kind, len(troubles(silo))) == ("out_of_memory", 5)


async def test_a_model_that_memory_does_not_hold_is_tried_once(tmp_path: Path) -> None:
    """Half a batch would make the same model."""
    silo, told = Silo(tmp_path), list[str]()
    path = tmp_path / "toy.py"
    path.write_text(
        path.read_text().replace("def model(self):", "def model(self):\n        raise MemoryError")
    )
    trainer = WorkerTrainer(silo.config, "alder", silo.config.state / "jobs")
    work = replace(silo.work(), trouble=lambda kind, detail, action: told.append(kind))
    with pytest.raises(WorkFailed, match=r"before a first batch.*MemoryError in toy\.py") as failed:
        await trainer.train(work, lambda *seen: None)
    await trainer.close()
    assert failed.value.kind == "out_of_memory"
    assert told == []


@pytest.mark.slow
async def test_a_task_whose_file_was_changed_is_loaded_anew(tmp_path: Path) -> None:
    """A process imports a file once; a policy that pins the code's hash reads the file as it is now."""
    silo = Silo(tmp_path)
    path = tmp_path / "toy.py"
    trainer = WorkerTrainer(silo.config, "alder", silo.config.state / "jobs")
    before = await trainer.evaluate(silo.work(phase="evaluate"), lambda *seen: None)
    path.write_text(path.read_text().replace('{"accuracy":', '{"mended":'))
    after = await trainer.evaluate(silo.work(phase="evaluate"), lambda *seen: None)
    child = trainer._child
    await trainer.evaluate(silo.work(phase="evaluate"), lambda *seen: None)
    assert trainer._child is child, "what has not changed stays warm"
    await trainer.close()
    assert "accuracy" in before
    assert "mended" in after


async def test_where_parts_are_another_training_it_says_so_and_tries_no_more(silo) -> None:
    silo.play("more than 4")
    (silo.config.folder / "summed").touch()
    async with silo.agent():
        failure = await until_done(silo, 1)
        assert failure.kind == "out_of_memory"
        assert "with parts of a batch: Toy.loss() must be the mean over the batch" in failure.detail
        failure = await until_done(silo, 2)
        assert failure.kind == "out_of_memory"
        assert "with parts" not in failure.detail
        assert len(troubles(silo)) == 1


async def test_dp_sgd_is_not_paid_for_twice(silo) -> None:
    privacy = {"level": "example", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "epsilon": 50.0}
    silo.job = silo.job.model_copy(update={"privacy": privacy_from(privacy)})
    silo.play("memory")
    async with silo.agent():
        assert (await until_done(silo, 1)).kind == "out_of_memory"
        assert troubles(silo) == []
    accounts = list((silo.config.state / "privacy").glob("*.json"))
    assert sum(len(json.loads(path.read_text())["entries"]) for path in accounts) <= 1
