"""The agent's side of a cluster: ranks under torchrun, warm between rounds, back after failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from roundtable.client.cluster.orders import Advice
from roundtable.client.cluster.resources import ClusterTable
from roundtable.client.cluster.trainer import ClusterTrainer
from roundtable.client.config import AgentConfig
from roundtable.client.failures import WorkFailed
from roundtable.client.steps import StepKey
from roundtable.client.trainer import Work
from roundtable.client.training import train
from roundtable.core import JobConfig, Layout, load_task, open_model, save_model
from roundtable.core.initial import initial_model
from roundtable.core.task import Site, initial_state

TASK = """
import os, pathlib, signal, time
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    def data(self, site):
        self.options = site.options
        self.calls = 0
        g = torch.Generator().manual_seed(site.options.get("seed", 1))
        x = torch.randn(80, 8, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:64], y[:64]), (x[64:], y[64:])
    def loss(self, model, batch):
        trouble = self.options.get("trouble", "")
        if trouble and model.training and int(os.environ.get("RANK", 0)) == 1:
            self.calls += 1
            mark = pathlib.Path(self.options["mark"])
            if self.calls == 6 and not mark.exists():
                mark.touch()
                if trouble == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if trouble == "hang":
                    signal.pause()
                if trouble == "device":
                    raise RuntimeError("CUDA error: device-side assert (not really)")
                if trouble == "memory":
                    raise torch.OutOfMemoryError("CUDA out of memory (not really)")
                raise ValueError("a mistake in the task")
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
    def pretrained(self, site):
        return pathlib.Path(site.options.get("base", site.options["empty"]))
"""
ALGORITHM = {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 8, "epochs": 2}


class Silo:
    """A trainer with a model to train, and what one process makes of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        (folder / "toy.py").write_text(TASK)
        self.job = JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": ALGORITHM})
        self.model = initial_model(self.job, load_task("toy.py", folder))
        self.path = folder / "start.safetensors"
        save_model(self.path, self.model)
        table = {"devices": 2, "backend": "gloo", "timeout": 20.0, **options.pop("table", {})}
        self.config = AgentConfig(
            coordinator="127.0.0.1:1",
            credentials=folder,
            state=folder / "state",
            tasks={"toy": "toy.py"},
            data={"mark": str(folder / "mark"), "empty": str(folder / "empty.safetensors"), **options},
            threads=1,
            folder=folder,
            cluster=ClusterTable.model_validate(table),
        )
        self.config.state.mkdir()
        safetensors.torch.save_file({}, folder / "empty.safetensors")

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[ClusterTrainer]:
        made = ClusterTrainer(self.config, "alder", self.config.state / "jobs")
        await made.start()
        try:
            yield made
        finally:
            await made.close()

    def work(self, round: int = 1, phase: str = "train", output: str = "update") -> Work:
        return Work(
            step=StepKey("job-1", round, 1, phase),
            client="alder",
            config=self.job.to_json(),
            job=self.job,
            task="toy.py",
            model=self.path,
            layout=self.model.layout.fingerprint,
            output=self.folder / output,
        )

    def alone(self, round: int = 1) -> torch.Tensor:
        task = load_task("toy.py", self.folder)
        data, _ = task.data(Site("alder", options={}))
        model = initial_state(task, self.job.seed)
        layout, vector = Layout.of(model, self.job.model.rules()), open_model(self.path).vector
        return train(task, model, data, self.job, layout, vector, round=round, client="alder").delta

    def update(self, output: str = "update") -> torch.Tensor:
        return torch.from_file(str(self.folder / output), size=self.model.layout.size).clone()


def watched(seen: list[int]) -> Any:
    return lambda done, total, loss: seen.append(done)


async def test_rounds_on_warm_ranks_equal_one_process(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    async with silo.trainer() as trainer:
        seen: list[int] = []
        trained = await trainer.train(silo.work(), watched(seen))
        assert trained.examples == 64
        assert trained.size == 4 * silo.model.layout.size
        assert seen[-1] == 128
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
        ranks = trainer.launches
        metrics = await trainer.evaluate(silo.work(phase="evaluate"), watched([]))
        assert metrics["accuracy"][1] == metrics["loss"][1] == 16
        await trainer.train(silo.work(round=2, output="second"), watched([]))
        assert torch.allclose(silo.update("second"), silo.alone(round=2), atol=1e-6)
        assert trainer.launches == ranks == 1


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["kill", "hang", "memory"])
async def test_the_update_comes_in_spite_of(trouble: str, tmp_path: Path) -> None:
    silo = Silo(tmp_path, trouble=trouble, table={"timeout": 6.0, "checkpoint_steps": 2})
    async with silo.trainer() as trainer:
        trained = await trainer.train(silo.work(), watched([]))
        assert (tmp_path / "mark").exists()
        assert trained.metrics["loss"][1] == 128
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
async def test_a_broken_device_is_left_out_and_the_round_goes_on(tmp_path: Path) -> None:
    silo = Silo(tmp_path, trouble="device", table={"checkpoint_steps": 2})
    async with silo.trainer() as trainer:
        trained = await trainer.train(silo.work(), watched([]))
        assert trained.metrics["loss"][1] == 128
        assert Advice.read(silo.config.state / "cluster").lost == (1,)
        assert trainer.launches == 2
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
async def test_only_adapters_travel(tmp_path: Path) -> None:
    silo = Silo(tmp_path, base=str(tmp_path / "base.safetensors"))
    rules = {"drop": ["0.*", "2.*"]}
    silo.job = JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": ALGORITHM, "model": rules})
    whole = initial_state(load_task("toy.py", tmp_path), 3)
    assert isinstance(whole, torch.nn.Module)
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "base.safetensors")
    silo.model = initial_model(silo.job, load_task("toy.py", tmp_path))
    save_model(silo.path, silo.model)
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
    assert silo.model.layout.size == 16 * 3 + 3
    assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
async def test_a_mistake_in_the_task_is_reported_once(tmp_path: Path) -> None:
    silo = Silo(tmp_path, trouble="mistake")
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match=r"ValueError in toy\.py") as failed:
            await trainer.train(silo.work(), watched([]))
        assert failed.value.kind == "task_error"


@pytest.mark.slow
async def test_a_withdrawn_order_leaves_the_ranks_ready(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    async with silo.trainer() as trainer:
        begun = asyncio.Event()
        order = asyncio.create_task(trainer.train(silo.work(), lambda *seen: begun.set()))
        await begun.wait()
        order.cancel()
        with pytest.raises(asyncio.CancelledError):
            await order
        await trainer.train(silo.work(), watched([]))
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
