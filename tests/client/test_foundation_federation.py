"""A pretrained model fine-tuned over silos: it learns, and a federation gives the bits of its simulation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import agents, federation_of, run_job, silo
from tiny_bases import POSITIONS, sentences, write_base

from roundtable.cli.main import run
from roundtable.core import JobConfig, load_task
from roundtable.core.errors import RoundtableError
from roundtable.core.identity.credentials import issue
from roundtable.core.initial_model import initial_model
from roundtable.operator import OperatorClient
from roundtable.simulation import simulate

TASK = """
from pathlib import Path
import roundtable as rt

class Toy(rt.HuggingFaceTask):
    def __init__(self, **settings):
        base = str(Path(__file__).with_name("base"))
        super().__init__(base, length={length}, targets="all-linear", **settings)

    def texts(self, site):
        texts = Path(__file__).with_name("texts.txt").read_text().split("\\n\\n")
        own = texts[site.options.get("seed", site.index)::2]
        return own[:-6], own[-6:]
"""
TABLE: dict[str, Any] = {
    "task": "toy",
    "rounds": 2,
    "cohort": {"size": 2},
    "algorithm": {"batch_size": 2, "learning_rate": 0.02},
    "simulation": {"clients": 2, "backend": "sequential"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", "gpt2")
    (tmp_path / "texts.txt").write_text("\n\n".join(sentences(48)))
    (tmp_path / "toy.py").write_text(TASK.format(length=POSITIONS))
    return tmp_path


def simulated(folder: Path, **tables: Any) -> Any:
    job = JobConfig.model_validate({**TABLE, **tables})
    task = load_task("toy.py", folder, parameters=job.task.parameters)
    return simulate(job, task, folder=folder, run_dir=folder / "run" if tables == {} else None)


@pytest.mark.slow
async def test_a_federation_gives_the_bits_of_its_simulation(folder: Path) -> None:
    job = JobConfig.model_validate(TABLE)
    result = simulated(folder)
    async with federation_of(folder, TASK.format(length=POSITIONS)) as (address, _):
        configs = []
        for number in range(2):
            name = f"client-{number}"
            issue(folder / "ca", name, "agent", folder / name)
            config = silo((address, folder), "alder")
            mine = {"credentials": folder / name, "state": folder / "state" / name}
            configs.append(replace(config, **mine, data={"seed": number}))
        async with agents(*configs):
            model = initial_model(job, load_task("toy.py", folder))
            status, _, final = await asyncio.to_thread(run_job, (address, folder), job, model)
            words = ["--coordinator", address, "--credentials", str(folder / "operator")]
            words += ["--task", str(folder), "-o", str(folder / "adapter")]
            with OperatorClient(address, folder / "operator") as operator:
                name = operator.jobs()[0].id
            assert await asyncio.to_thread(run, ["job", "export", name, *words]) == 0
    assert status == "finished"
    assert torch.equal(final.vector, result.model.vector)
    words = ["--task", str(folder), "-o", str(folder / "simulated")]
    assert run(["job", "export", str(folder / "run"), *words]) == 0
    one, other = (folder / name / "adapter_model.safetensors" for name in ("adapter", "simulated"))
    assert one.read_bytes() == other.read_bytes()
    assert "| rounds | 2, fedavg |" in (folder / "adapter" / "README.md").read_text()
    perplexities = [record["token_perplexity"] for record in result.history]
    assert perplexities[-1] < perplexities[0] < 250


@pytest.mark.parametrize("backend", ["vectorised", "stacked"])
def test_other_backends_give_the_same_model(folder: Path, backend: str) -> None:
    one, other = (
        simulated(folder, rounds=1, simulation={"clients": 2, "backend": name})
        for name in ("sequential", backend)
    )
    torch.testing.assert_close(one.model.vector, other.model.vector, rtol=1e-6, atol=1e-7)
    error = one.history[0]["train_merge_error"]
    assert 0 < error < 1
    if backend == "stacked":  # It adds updates up where they are made: no single one is known.
        assert "train_merge_error" not in other.history[0]
    else:
        assert other.history[0]["train_merge_error"] == pytest.approx(error, rel=1e-3)


def test_example_level_privacy_trains_adapters(folder: Path) -> None:
    privacy = {"level": "example", "epsilon": 8, "delta": 1e-3, "clip_norm": 1.0, "batch_size": 4}
    tables = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}, "rounds": 1}
    result = simulated(folder, privacy={**privacy, "local_steps": 1}, **tables)
    start = initial_model(JobConfig.model_validate(TABLE), load_task("toy.py", folder))
    assert result.model.vector.isfinite().all()
    assert not torch.equal(result.model.vector, start.vector)


@pytest.mark.slow
def test_what_single_rows_have_no_gradient_of_is_refused(folder: Path) -> None:
    privacy = {"level": "example", "epsilon": 8, "delta": 1e-3, "clip_norm": 1.0, "batch_size": 4}
    tables = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}, "rounds": 1}
    job = JobConfig.model_validate(
        {
            **TABLE,
            **tables,
            "task": {"name": "toy", "method": "dora"},
            "privacy": {**privacy, "local_steps": 1},
        }
    )
    with pytest.raises(RoundtableError, match=r"lora_magnitude_vector\.default \(DoraLinearLayer\)"):
        simulate(job, folder=folder)
