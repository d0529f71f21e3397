"""Every algorithm over a real coordinator and real agents: the models and figures that a simulation gives.

Batches hold all of a silo's examples, so that no draw depends on a silo's name.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import algorithm_table as table
import pytest
import torch
from federation import NAMES, Federation, agents, federation_of, run_job, silo

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.core import JobConfig, load_task
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.errors import RoundtableError
from roundtable.core.initial_model import initial_model
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.base(x))

class Toy(Task):
    def model(self):
        return Net()
    def data(self, site):
        place = site.options["seed"] if "seed" in site.options else site.index
        g = torch.Generator().manual_seed(place)
        labels = torch.randint(0, 2, (24 + 8 * place,), generator=g) + place % 2
        x = torch.randn(len(labels), 6, generator=g) + F.one_hot(labels, 6) * 2.0
        return (x[8:], labels[8:]), (x[:8], labels[:8])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def features(self, model, batch):
        return model.base(batch[0])
"""


def job_of(name: str, column: str) -> JobConfig:
    document = table.document_of(name, column)
    document |= {
        "task": "toy",
        "seed": 3,
        "rounds": 2,
        "evaluation": {"every": int("privacy" not in document)},
    }
    document.setdefault("cohort", {"size": 3, "minimum": 3})
    document["algorithm"] |= {"batch_size": 64, "learning_rate": 0.05}
    document["simulation"] = {"clients": 3, "backend": "sequential"}
    if not make_algorithm(JobConfig.model_validate(document).algorithm).composition.averaged_buffers:
        document["model"] = {"buffers": "local"}
    return JobConfig.model_validate(document)


@pytest.mark.parametrize(
    "column",
    [
        "",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("secure sums", "FedAdam", "robust rules")),
    ],
)
async def test_silos_give_what_clients_of_a_simulation_do(tmp_path: Path, column: str) -> None:
    """From round 2 on it also depends on what a silo keeps, and on what the server counts on of that."""
    ran = 0
    async with federation_of(tmp_path, TASK) as federation:
        task: Any = load_task("toy.py", tmp_path)
        async with agents(*(silo(federation, name) for name in NAMES)):
            for name in sorted(table.ROWS):
                if "by speed" in name or table.refusal(name, column):
                    continue
                await both_ways(federation, job_of(name, column), task, column)
                ran += 1
    assert ran > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("column", ["", "secure sums", "FedAdam", "robust rules", "momentum"])
async def test_a_silo_with_a_cluster_does_what_another_does(tmp_path: Path, column: str) -> None:
    """Two ranks in the place of one process, for each algorithm that goes together with them."""
    ran = 0
    async with federation_of(tmp_path, TASK) as federation:
        task: Any = load_task("toy.py", tmp_path)
        silos = [silo(federation, name) for name in NAMES]
        ranks = ClusterTable.model_validate({"devices": 2, "memory": "4GiB", "backend": "gloo"})
        async with agents(silos[0], replace(silos[1], cluster=ranks), silos[2]):
            for name in sorted(table.ROWS):
                if table.refusal(name, table.CLUSTER) or table.refusal(name, column):
                    continue
                await both_ways(federation, job_of(name, column), task, column, 1e-5)
                ran += 1
    assert ran > 4


async def both_ways(
    federation: Federation, job: JobConfig, task: Any, column: str = "", loose: float = 1e-6
) -> None:
    """Silos and a simulation's clients end with the same models and losses, and not with the initial ones."""
    name, model = job.algorithm.name, initial_model(job, task)
    status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    expected = await asyncio.to_thread(simulate, job, task, progress=False)
    assert status == "finished", name
    came = [len(record["contributors"]) for record in history]  # type: ignore[arg-type]
    assert came == [job.cohort.size] * 2, name
    # Under masks, within the ring's rounding of two rounds of values of up to 10.
    loose = 4e-3 if column == "secure sums" else loose
    if job.evaluation.every:
        losses = [record["evaluation"]["loss"] for record in history]  # type: ignore[index]
        found = [total / count for total, count in losses]
        assert found == pytest.approx(expected.history["loss"], abs=loose), name
    off = (final.vector - expected.model.vector).abs().max()
    assert off < loose, (name, float(off))
    assert not torch.equal(final.vector, model.vector), name


async def test_a_silo_refuses_what_its_own_task_cannot_do_as_the_job_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who submits may have another version of the task, or none: silos know theirs."""
    own = "    def optimizer(self, p):\n        return torch.optim.Adam(p)\n"
    job = job_of("scaffold", "")
    async with federation_of(tmp_path, TASK + own) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert (status, history) == ("paused", [])
    assert torch.equal(final.vector, model.vector)
    assert "'scaffold' counts on steps of SGD as [algorithm] describes them, and Toy brings" in caplog.text


async def test_a_coordinator_refuses_noise_on_running_statistics(tmp_path: Path) -> None:
    job = job_of("fedavg", "`client`")
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        with pytest.raises(RoundtableError, match="a running variance of BatchNorm would turn negative"):
            await asyncio.to_thread(run_job, federation, job, model)
