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
from roundtable.core.algorithms.factors.factor_pairs import factor_pairs
from roundtable.core.errors import ModelMismatch, TaskError
from roundtable.core.identity.credentials import issue
from roundtable.core.initial_model import initial_model
from roundtable.core.models import Model
from roundtable.engine.combining import combine
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


def oracle(name: str, rows: list[torch.Tensor], shares: list[float], start: Model) -> torch.Tensor:
    """float64: the factors of each pair as products and whole SVDs have them, the plain mean of all else."""
    begun, weights = start.vector.double(), torch.tensor(shares, dtype=torch.float64)
    ends = [begun + row.double() for row in rows]
    made = sum(weight * end for weight, end in zip(weights, ends, strict=True))
    assert isinstance(made, torch.Tensor)
    for pair in factor_pairs(start.layout):
        own = [tuple(part[0] for part in pair.factors(end[None], 0)) for end in ends]
        if name == "hetlora":  # Cho et al. 2024, section 3.3.
            norms = torch.stack([torch.linalg.matrix_norm(up @ down) for down, up in own])
            down, up = (
                sum(n * each[k] for n, each in zip(norms / norms.sum(), own, strict=True)) for k in (0, 1)
            )
        else:  # Bai et al. 2024, section 3.2; Wang et al. 2024, equations 6 to 9, which keep ΔW.
            product = sum(weight * up @ down for weight, (down, up) in zip(weights, own, strict=True))
            if name == "flora":
                (before,), (after,) = pair.factors(begun[None], 0)
                product = product + after @ before
            u, values, vt = torch.linalg.svd(product, full_matrices=False)
            down, up = vt[: pair.rank], u[:, : pair.rank] * values[: pair.rank]
            signs = up.gather(0, up.abs().argmax(0, keepdim=True)).sign()
            down, up = down * signs.T, up * signs
        made[pair.down], made[pair.up] = down.flatten(), up.flatten()
    return made


@pytest.mark.parametrize("name", ["flora", "flexlora", "hetlora"])
def test_factors_are_merged_and_the_head_averaged(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of silos of unlike ranks and sizes, whatever the norms of their factors are."""
    seen: list[tuple[list[torch.Tensor], list[float], torch.Tensor]] = []
    merged = combine.merged

    def watched(algorithm: Any, pairs: Any, rows: Any, weights: Any, model: Any, vector: Any) -> Any:
        blocks = torch.cat([block.clone() for _, _, block in rows.matrix.blocks()], 1)
        examples = [update.examples for update in rows.updates]
        seen.append((list(blocks), [n / sum(examples) for n in examples], model.clone()))
        return merged(algorithm, pairs, rows, weights, model, vector)

    monkeypatch.setattr(combine, "merged", watched)
    steps = {"name": name, "batch_size": 4, "learning_rate": 2e-2, "ranks": {"client-1": 2}}
    task = {"rank": 4, "targets": "all-linear"}
    simulation = {"clients": 2, "backend": "sequential", "data": {"file": str(folder / "rows.jsonl")}}
    simulation |= {"partition": {"name": "dirichlet", "alpha": 1.0}}
    job = job_of(folder, steps, task=task, rounds=2, seed=5, simulation=simulation)
    result = simulate(job, folder=folder)
    start = initial_model(job, load_task(job.task.name, folder, parameters=job.task.parameters))
    assert len(seen) == 2
    for number, (rows, shares, begun) in enumerate(seen):
        after = seen[number + 1][2] if number + 1 < len(seen) else result.model.vector
        wanted = oracle(name, rows, shares, replace(start, vector=begun))
        torch.testing.assert_close(after.double(), wanted, rtol=1e-4, atol=1e-6)


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
@pytest.mark.parametrize("algorithm", ["fedavg", "flora", "flexlora", "hetlora"])
async def test_a_federation_gives_the_bits_of_its_simulation(folder: Path, algorithm: str) -> None:
    (folder / "toy.py").write_text(TOY)
    steps: dict[str, Any] = {"name": algorithm, "batch_size": 4, "learning_rate": 5e-3}
    if algorithm != "fedavg":
        steps["ranks"] = {"client-1": 2}
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
