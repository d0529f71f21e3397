"""An encoder under a head of classes over silos: it learns, whichever way head and adapters travel."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import agents, federation_of, run_job, silo
from tiny_bases import write_encoder

from roundtable.cli.main import run
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.errors import ModelMismatch, TaskError
from roundtable.core.identity.credentials import issue
from roundtable.core.initial_model import initial_model
from roundtable.simulation import simulate

LABELS = ["asleep", "better", "worse"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_encoder(tmp_path / "base")
    lines = [json.dumps({"text": f"bed {n % 7}: {LABELS[n % 3]}", "label": LABELS[n % 3]}) for n in range(48)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def job_of(folder: Path, algorithm: dict[str, Any], **tables: Any) -> JobConfig:
    task = {
        **{"name": "roundtable:HuggingFaceClassifier", "base": str(folder / "base"), "labels": LABELS},
        **{"length": 32, "test_share": 0.25, **tables.pop("task", {})},
    }
    simulation = {"clients": 2, "backend": "sequential", "data": {"file": str(folder / "rows.jsonl")}}
    return JobConfig.model_validate(
        {"task": task, "cohort": {"size": 2}, "algorithm": algorithm, "simulation": simulation, **tables}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "method"), [("fedavg", "full"), ("flora", "lora")])
def test_it_learns(folder: Path, algorithm: str, method: str) -> None:
    """FLoRA begins each round with fresh factors, and the head goes on from the silos' mean."""
    steps = {"name": algorithm, "batch_size": 4, "epochs": 4, "learning_rate": 5e-3}
    task = {"method": method, "targets": None if method == "full" else "all-linear"}
    history = simulate(job_of(folder, steps, task=task, rounds=5), folder=folder).history
    assert history[-1]["accuracy"] == history[-1]["label_accuracy"]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert history[-1]["accuracy"] > 0.6  # Of three labels in equal parts.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "ffa_lora"])
def test_example_level_privacy_trains_head_and_adapters(folder: Path, method: str) -> None:
    privacy = {"level": "example", "epsilon": 8, "delta": 1e-3, "clip_norm": 1.0, "batch_size": 4}
    steps = {"steps": 2, "learning_rate": 0.01}
    tables = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}, "rounds": 1}
    job = job_of(folder, steps, task={"method": method}, privacy=privacy, **tables)
    model = simulate(job, folder=folder).model
    start = initial_model(job, load_task(job.task.name, folder, parameters=job.task.parameters))
    for spec in model.layout.averaged:
        place = slice(spec.offset, spec.offset + spec.size)
        assert not torch.equal(model.vector[place], start.vector[place]), spec.name


def test_a_silos_training_process_trains_and_measures_it(folder: Path) -> None:
    """Also once the rows are mended, in the same process; another base is none of the job's."""
    job = job_of(folder, {"batch_size": 4, "steps": 2, "learning_rate": 5e-3}, task={"test_share": 0.0})
    options = {"file": str(folder / "rows.jsonl"), "test_file": str(folder / "rows.jsonl")}
    executor = Executor(Settings("a", str(folder), str(folder / "jobs"), "cpu", 1, options, generations=2))
    order = order_of(folder, job, "first")
    right = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(right.replace('"label": "worse"', '"label": "dead"', 1))
    with pytest.raises(TaskError, match=r"rows\.jsonl, line 3: its label is none of the job's") as caught:
        executor.train(order, lambda *seen: None)
    assert "dead" not in str(caught.value)
    (folder / "rows.jsonl").write_text(right)
    assert executor.train(order, lambda *seen: None).examples == 48
    assert executor.evaluate(replace(order, phase="evaluate"))["accuracy"][1] == 48
    config = json.loads((folder / "base" / "config.json").read_text())
    (folder / "base" / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-3}))
    with pytest.raises(ModelMismatch, match="the digest of its model config is"):
        executor.train(replace(order, job="again"), lambda *seen: None)


TOY = """
from pathlib import Path
import roundtable as rt
from roundtable.core.foundation.labelled_rows import read_labelled

class Toy(rt.HuggingFaceClassifier):
    def __init__(self, **settings):
        here = Path(__file__).parent
        labels = ["asleep", "better", "worse"]
        super().__init__(str(here / "base"), labels, 32, targets="all-linear", **settings)

    def rows(self, site):
        own = read_labelled(Path(__file__).with_name("rows.jsonl"), self.labels, "text", "label")
        own = own[site.options.get("seed", site.index)::2]
        return own[:-6], own[-6:]
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "flora"])
async def test_a_federation_gives_the_bits_of_its_simulation(folder: Path, algorithm: str) -> None:
    (folder / "toy.py").write_text(TOY)
    steps = {"name": algorithm, "batch_size": 4, "learning_rate": 5e-3}
    table = {"task": "toy", "rounds": 2, "cohort": {"size": 2}, "algorithm": steps}
    job = JobConfig.model_validate({**table, "simulation": {"clients": 2, "backend": "sequential"}})
    result = simulate(job, load_task("toy.py", folder), folder=folder)
    # Before there is a coordinator, whose loop the import of transformers would hold.
    model = initial_model(job, load_task("toy.py", folder))
    async with federation_of(folder, TOY) as (address, _):
        configs = []
        for number in range(2):
            name = f"client-{number}"
            issue(folder / "ca", name, "agent", folder / name)
            mine = {"credentials": folder / name, "state": folder / "state" / name, "data": {"seed": number}}
            policy = PolicyTable(bases=[str(folder)])
            configs.append(replace(silo((address, folder), "alder"), **mine, policy=policy))
        async with agents(*configs):
            status, history, final = await asyncio.to_thread(run_job, (address, folder), job, model)
        words = ["--coordinator", address, "--credentials", str(folder / "operator"), "--task", str(folder)]
        words = ["job", "export", job.title, *words, "-o", str(folder / "adapter")]
        assert await asyncio.to_thread(run, words) == 0
    assert status == "finished"
    assert torch.equal(final.vector, result.model.vector)
    assert history[-1]["evaluation"]["accuracy"][1] == 12
    assert "a head of 3 labels: asleep, better, worse" in (folder / "adapter" / "README.md").read_text()


def order_of(folder: Path, job: JobConfig, name: str) -> Order:
    """Round 1 of a job that is submitted now."""
    model = initial_model(job, load_task(job.task.name, folder, parameters=job.task.parameters))
    path, made = folder / f"{name}.safetensors", model.layout.fingerprint
    save_model(path, model)
    return Order(name, 1, "train", job.to_json(), job.task.name, str(path), made, str(folder / f"{name}.out"))
