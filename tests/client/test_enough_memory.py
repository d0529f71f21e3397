"""What a training step needs of memory is known before the first, and refused with what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_silo import Silo
from real_memory import peak_of
from tiny_bases import POSITIONS, sentences, write_base
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import roundtable as rt
from roundtable.client.failures import WorkFailed
from roundtable.client.first_batch.enough_memory import Room
from roundtable.client.first_batch.step_memory import NotEstimated, bytes_of, step_memory
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core import JobConfig
from roundtable.core.errors import InsufficientMemory
from roundtable.core.task import Site, Task
from roundtable.simulation import simulate


class Classes(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5))

    def data(self, site: Site) -> Any:
        return (torch.randn(32, 64), torch.randint(5, (32,))), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Pictures(Classes):
    def model(self) -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(64, 5))

    def data(self, site: Site) -> Any:
        return (torch.randn(16, 3, 32, 32), torch.randint(5, (16,))), None


class Looking(Classes):
    """Its step depends on values, and cannot be gone through without them."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * 2 if float(loss.detach()) > 100 else loss


class Language(Classes):
    def __init__(self, adapters: bool) -> None:
        self.adapters = adapters

    def model(self) -> nn.Module:
        transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 4}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        return peft.get_peft_model(model, peft.LoraConfig(r=4)) if self.adapters else model  # type: ignore[no-any-return]

    def data(self, site: Site) -> Any:
        # Two texts to a row: transformers looks at places, and the mask is another one.
        places = torch.cat([torch.arange(40), torch.arange(24)]).expand(4, -1).contiguous()
        return (torch.randint(300, (4, 64)), places), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        ids, places = batch
        found: Tensor = model(input_ids=ids, labels=ids, position_ids=places, use_cache=False).loss
        return found


ADAM = partial(torch.optim.AdamW, lr=1e-3)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [(Classes(), ADAM), (Pictures(), MOMENTUM), (Language(False), ADAM), (Language(True), ADAM)],
    ids=["perceptron", "convolutions", "transformer", "adapters"],
)
def test_what_a_step_needs_is_what_it_then_allocates(task: Classes, optimizer: Callable[..., Any]) -> None:
    model, (batch, _) = task.model().train(), task.data(Site("s"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    estimated = step_memory(task, model, batch, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    made = optimizer([each for each in model.parameters() if each.requires_grad])

    def step() -> None:
        made.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        made.step()

    step()
    made.zero_grad()
    held = bytes_of(model) + estimated.optimizer
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        step()
    assert 0.9 < estimated.peak / (held + peak_of(traced)) < 1.05


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("task", "optimizer"),
    [(Classes(), ADAM), (Pictures(), MOMENTUM), (Language(False), ADAM), (Language(True), ADAM)],
    ids=["perceptron", "convolutions", "transformer", "adapters"],
)
def test_what_a_step_needs_is_no_more_than_a_gpu_then_allocates(
    task: Classes, optimizer: Callable[..., Any]
) -> None:
    gpu, model = torch.device("cuda:0"), task.model().train()
    rows = tuple(part.repeat(16, *[1] * (part.dim() - 1)) for part in task.data(Site("s"))[0])
    estimated = step_memory(task, model, rows, optimizer, device=gpu)
    model, batch = model.to(gpu), tuple(part.to(gpu) for part in rows)
    made = optimizer([each for each in model.parameters() if each.requires_grad])
    # The first step takes memory for the libraries' own use, which stays.
    for _ in range(2):
        made.zero_grad()
        beside = torch.cuda.memory_allocated() - bytes_of(model) - estimated.optimizer
        torch.cuda.reset_peak_memory_stats()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        made.step()
    taken = torch.cuda.max_memory_allocated() - beside
    print(f"{type(task).__name__}: {estimated.peak / taken:.2f} of {taken / (1 << 20):.1f} MiB")
    assert 0.6 < estimated.peak / taken < 1.05


TABLE: dict[str, Any] = {
    "task": "toy",
    "rounds": 1,
    "algorithm": {"batch_size": 8, "learning_rate": 0.1, "steps": 1},
    "simulation": {"clients": 1, "backend": "sequential"},
}


def simulated_in(bytes: int, monkeypatch: pytest.MonkeyPatch, task: Task, folder: Path, **tables: Any) -> Any:
    monkeypatch.setattr("roundtable.simulation.first_trial.room_on", lambda device: Room(bytes, "free here"))
    return simulate(JobConfig.model_validate({**TABLE, **tables}), task, folder=folder, progress=False)


def test_a_simulation_is_refused_with_what_would_fit(monkeypatch, tmp_path: Path) -> None:
    """A base of which all weights train, and one whose adapters do."""
    write_base(tmp_path / "base", "gpt2")
    (tmp_path / "texts.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in sentences(48)))
    table = {**TABLE["simulation"], "data": {"file": str(tmp_path / "texts.jsonl")}}
    full = rt.HuggingFaceTask(str(tmp_path / "base"), length=POSITIONS, method="full")
    with pytest.raises(InsufficientMemory) as refused:
        simulated_in(1 << 22, monkeypatch, full, tmp_path, simulation=table)
    said = str(refused.value)
    for words in ("weights", "gradients", "optimizer", "activations of 8 examples", "there are", "free here"):
        assert words in said
    assert "What would fit, by estimate: algorithm.batch_size = " in said
    assert '[task] method = "lora"' in said
    assert f"[task] length = {POSITIONS // 2}" in said
    assert "[cluster]" not in said
    few = rt.HuggingFaceTask(str(tmp_path / "base"), length=POSITIONS, targets="all-linear")
    with pytest.raises(InsufficientMemory, match=r'Not enough alone.*precision = "bfloat16"'):
        simulated_in(1 << 10, monkeypatch, few, tmp_path, simulation=table)


def test_what_cannot_be_known_is_not_refused(monkeypatch, tmp_path: Path) -> None:
    task = Looking()
    with pytest.raises(NotEstimated, match="DataDependent"):
        step_memory(task, task.model(), task.data(Site("s"))[0], ADAM)
    assert simulated_in(1 << 10, monkeypatch, task, tmp_path).status == "finished"
    with pytest.raises(InsufficientMemory, match=r"Otherwise take a smaller model$"):
        simulated_in(1 << 10, monkeypatch, Classes(), tmp_path)


class Wider(Classes):
    """2.8 GB of weights, and as many for the layer between of 36 examples."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 10_000_000), nn.ReLU(), nn.Linear(10_000_000, 5))

    def data(self, site: Site) -> Any:
        return (torch.randn(8192, 64), torch.randint(5, (8192,))), None


@pytest.mark.gpu
def test_what_is_said_to_fit_a_gpu_does(tmp_path: Path) -> None:
    table = {**TABLE["simulation"], "device": "cuda"}

    def simulated(examples: int) -> Any:
        algorithm = {**TABLE["algorithm"], "batch_size": examples}
        job = JobConfig.model_validate({**TABLE, "simulation": table, "algorithm": algorithm})
        return simulate(job, Wider(), folder=tmp_path, progress=False)

    with pytest.raises(InsufficientMemory, match="free on the GPU") as refused:
        simulated(8192)
    said = re.search(r"algorithm\.batch_size = (\d+)", str(refused.value))
    assert said is not None
    print(refused.value)
    assert simulated(int(said[1])).status == "finished"


WIDE = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, {width}), nn.Tanh(), nn.Linear({width}, 3))
    def data(self, site):
        x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        return (x, y), (x, y)
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.parametrize(
    ("device", "limit", "too_wide"),
    [
        pytest.param("cpu", "max_memory", 1 << 22, marks=pytest.mark.slow),
        pytest.param("cuda", "max_gpu_memory", 1 << 23, marks=pytest.mark.gpu),
    ],
)
async def test_a_silo_trains_in_parts_or_refuses_before_it_begins(
    device: str, limit: str, too_wide: int, tmp_path: Path
) -> None:
    """The limit is that of its process, which would be ended beyond it."""
    told = list[tuple[str, str, str]]()
    for width in (1 << 20, too_wide):
        folder = tmp_path / str(width)
        folder.mkdir()
        job = {"algorithm": {"batch_size": 64, "learning_rate": 0.1, "steps": 1}}
        silo = Silo(folder, job, WIDE.format(width=width), policy={limit: "480MiB"})
        trainer = WorkerTrainer(replace(silo.config, device=device), "alder", silo.config.state / "jobs")
        work = replace(silo.work(), trouble=lambda *said: told.append(said))
        try:
            if width < too_wide:
                await trainer.train(work, lambda *seen: None)
            else:
                with pytest.raises(WorkFailed) as failed:
                    await trainer.train(work, lambda *seen: None)
        finally:
            await trainer.close()
    assert [kind for kind, _, _ in told] == ["out_of_memory"]
    assert "activations of 64 examples" in told[0][1]
    assert told[0][2].startswith("reduced the batch size: no more than ")
    assert (failed.value.kind, failed.value.whole) == ("out_of_memory", True)
    assert f"[policy] {limit}" in failed.value.detail
    assert "give the silo a [cluster]" in failed.value.detail
