"""How long a silo's replica is away when its rank is killed, and what its return costs.

    python benchmarks/replica_return.py                        # three replicas of one rank, five kills
    python benchmarks/replica_return.py --ranks 2 --kills 3 --json

A round goes on over replicas on CPUs while a rank of one is ended by SIGKILL, again and again. Given for
each: seconds from the kill until the replica trains again, CPU seconds (user and system) of all processes
that were started meanwhile, and the seconds that the step of the loss took beside the median of other steps.
The machine's load average stands beside them: seconds by the clock are of what else it had to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.config import AgentConfig
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import StepWork
from roundtable.cluster.agent.cluster_trainer import ClusterTrainer
from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.initial_model import initial_model

TASK = """
import os, pathlib, time
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    def data(self, site):
        if "ROUNDTABLE_REPLICA" in os.environ:
            name = f"{os.environ['ROUNDTABLE_REPLICA']}-{os.environ['LOCAL_RANK']}-{os.getpid()}"
            pathlib.Path(site.options["ranks"], name).touch()
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        return (x, x[:, :3].argmax(1)), (x, x[:, :3].argmax(1))
    def loss(self, model, batch):
        if model.training and type(batch[0]) is torch.Tensor:
            time.sleep(0.02)
        return F.cross_entropy(model(batch[0]), batch[1])
"""
_VICTIM = 1


def _work(folder: Path, job: JobConfig) -> StepWork:
    model = initial_model(job, load_task("toy.py", folder))
    save_model(folder / "start.safetensors", model)
    return StepWork(
        step=StepKey("job-1", 1, 1, "train"),
        client="silo",
        config=job.to_json(),
        job=job,
        task="toy.py",
        model=folder / "start.safetensors",
        layout=model.layout.fingerprint,
        output=folder / "update",
    )


def _descendants() -> dict[int, float]:
    """CPU seconds of this process's descendants, by id."""
    used = {}
    for each in psutil.Process().children(recursive=True):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        used[each.pid] = times.user + times.system
    return used


async def _looks(seconds: float = 600.0) -> AsyncIterator[None]:
    """Again and again, for so long at most."""
    async with asyncio.timeout(seconds):
        while True:
            yield
            await asyncio.sleep(0.01)


async def measure(folder: Path, replicas: int, ranks: int, kills: int) -> list[dict[str, float]]:
    """Runs a round on so many replicas of so many ranks, and kills the last rank of one so often."""
    (folder / "toy.py").write_text(TASK)
    (folder / "ranks").mkdir()
    (folder / "state").mkdir()
    algorithm = {"learning_rate": 0.01, "batch_size": 12, "epochs": 100_000}
    job = JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": algorithm})
    table = {
        "devices": replicas * ranks,
        "backend": "gloo",
        "elastic": "replica",
        "replica_devices": ranks,
        "restarts": kills + 5,
        "strategy": {"data_parallel": "ddp" if ranks > 1 else "none", "micro_batch": 12},
    }
    config = AgentConfig(
        coordinator="127.0.0.1:1",
        credentials=folder,
        state=folder / "state",
        tasks={"toy": "toy.py"},
        data={"ranks": str(folder / "ranks")},
        threads=1,
        folder=folder,
        cluster=ClusterTable.model_validate(table),
    )
    trainer = ClusterTrainer(config, "silo", config.state / "jobs")
    await trainer.start()
    groups = trainer.groups
    assert groups is not None
    steps: list[float] = []

    def seen(done: int, total: int, loss: float, figures: Any = None) -> None:
        steps.append(figures["seconds"])

    training = asyncio.create_task(trainer.train(_work(folder, job), seen))
    measured = []
    try:
        for _ in range(kills):
            begun = len(groups.verdicts)
            async for _ in _looks():
                if training.done():
                    training.result()
                if len(groups.verdicts) > begun + 20:
                    break
            plain = statistics.median(steps[-15:])
            names = [one.name.split("-") for one in (folder / "ranks").glob(f"{_VICTIM}-{ranks - 1}-*")]
            (victim,) = [int(pid) for _, _, pid in names if psutil.pid_exists(int(pid))]
            told, stepped = len(groups.verdicts), len(steps)
            before, began = _descendants(), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            async for _ in _looks():
                if any(_VICTIM in one.joining for one in groups.verdicts[told:]):
                    break
            measured.append(
                {
                    "seconds": time.monotonic() - began,
                    "cpu_seconds": sum(s for pid, s in _descendants().items() if pid not in before),
                    "step_of_the_loss": max(steps[stepped:]),
                    "other_steps": plain,
                    "load": os.getloadavg()[0],
                }
            )
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await trainer.close()
    return measured


def main() -> int:
    """Prints what each kill cost, or all of it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of each replica")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(Path(folder), asked.replicas, asked.ranks, asked.kills))
    if asked.json:
        print(json.dumps(measured, indent=2))
        return 0
    for one in measured:
        print(
            f"trained again after {one['seconds']:.2f} s, {one['cpu_seconds']:.2f} s of CPU; the step of the "
            f"loss {one['step_of_the_loss']:.2f} s, others {one['other_steps']:.2f} s; load {one['load']:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
