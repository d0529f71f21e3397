"""A silo with a cluster of two CPU ranks, its agent's trainer, and what one process makes of its work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import StepWork
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.cluster.agent.cluster_trainer import ClusterTrainer
from roundtable.cluster.plan.resources import Resources
from roundtable.core import JobConfig, Layout, Model, load_task, open_model, save_model
from roundtable.core.initial_model import initial_model
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
        rank = int(os.environ.get("RANK", 0))
        if trouble == "chatter":
            print("#" * (1 << 21), end="", flush=True)
        elif trouble and model.training and (rank == 1 or trouble == "freeze"):
            self.calls += 1
            mark = pathlib.Path(self.options["mark"] + ("-0" if rank == 0 else ""))
            if self.calls == self.options.get("call", 6) and not mark.exists():
                mark.touch()
                if trouble == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if trouble == "launcher":
                    os.kill(os.getppid(), signal.SIGKILL)
                    signal.pause()
                if trouble == "hang":
                    signal.pause()
                if trouble == "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if trouble == "device":
                    raise RuntimeError("CUDA error: uncorrectable ECC error encountered (not really)")
                if trouble == "memory":
                    raise torch.OutOfMemoryError("CUDA out of memory (not really)")
                if trouble == "watchdog":
                    print("[rank1]:[E318 09:26:18.141 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID "
                        "0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
                        "CUDA error: device-side assert triggered", flush=True)
                    os.kill(os.getpid(), signal.SIGABRT)
                if trouble == "assert":
                    raise RuntimeError("CUDA error: device-side assert triggered (not really)")
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

    def __init__(
        self, folder: Path, job: dict[str, Any] | None = None, code: str = TASK, **options: Any
    ) -> None:
        self.folder = folder
        (folder / "toy.py").write_text(code)
        table = {"task": "toy", "seed": 3, "algorithm": ALGORITHM, **(job or {})}
        self.job = JobConfig.model_validate(table)
        self.model = initial_model(self.job, load_task("toy.py", folder))
        self.path = folder / "start.safetensors"
        save_model(self.path, self.model)
        policy = PolicyTable.model_validate(options.pop("policy", {}))
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
            policy=policy,
        )
        self.config.state.mkdir(exist_ok=True)
        safetensors.torch.save_file({}, folder / "empty.safetensors")

    @asynccontextmanager
    async def trainer(self, devices: list[int] | None = None) -> AsyncIterator[ClusterTrainer]:
        """`devices`, if given, says in its last entry how many there are now."""
        made = ClusterTrainer(self.config, "alder", self.config.state / "jobs")
        if devices is not None:
            made = ClusterTrainer(
                self.config,
                "alder",
                self.config.state / "jobs",
                lambda: Resources(1, devices[-1], 1 << 30, "cpu"),
            )
        await made.start()
        try:
            yield made
        finally:
            await made.close()

    def work(
        self, round: int = 1, phase: str = "train", output: str = "update", counted: int | None = None
    ) -> StepWork:
        """`counted`: the round whose update is the newest in the model."""
        return StepWork(
            step=StepKey("job-1", round, 1, phase),
            client="alder",
            config=self.job.to_json(),
            job=self.job,
            task="toy.py",
            model=self.path,
            layout=self.model.layout.fingerprint,
            output=self.folder / output,
            counted=None if counted is None else StepKey("job-1", counted, 1, "train"),
        )

    def go_on(self, output: str = "update") -> None:
        """The next round starts from this one's weights."""
        model = open_model(self.path)
        vector = model.vector + self.update(output)
        self.path = self.folder / f"after-{output}.safetensors"
        save_model(self.path, Model(model.layout, vector, dict(model.local), dict(model.metadata)))

    def alone(self, round: int = 1, local: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """What one process gives; `local` is what an earlier round left, and gets what this one leaves."""
        task = load_task("toy.py", self.folder)
        data, _ = task.data(Site("alder", options={}))
        model = initial_state(task, self.job.seed)
        layout, vector = Layout.of(model, self.job.model.rules()), open_model(self.path).vector
        update = train(task, model, data, LocalWork(self.job, layout, vector, round, "alder", local or None))
        if local is not None:
            local.update(update.local)
        return update.delta

    def update(self, output: str = "update") -> torch.Tensor:
        return torch.from_file(str(self.folder / output), size=self.model.layout.size).clone()


def watched(seen: list[int]) -> Any:
    return lambda done, *rest: seen.append(done)
