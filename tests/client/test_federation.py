"""Whole federations: the real coordinator, real agents with their training processes, and a script."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import NAMES, Federation, agents, federation_of, run_job, silo
from safetensors.torch import load_file

from roundtable.cli.main import run as run_command
from roundtable.client.join import join
from roundtable.client.policy.config import AgentConfig
from roundtable.client.worker import worker_trainer
from roundtable.client.worker.script_trainer import Round
from roundtable.core import JobConfig, Layout, Model, Site, load_task
from roundtable.core.initial_model import initial_model

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(48, 4, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:32], y[:32]), (x[32:], y[32:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""

FAILS_ONCE = """
    def loss(self, model, batch, context):
        from pathlib import Path
        flag = Path(__file__).with_name("failed")
        if (context.round, context.site) == (3, "cedar") and not flag.exists():
            flag.touch()
            raise ValueError("this once")
        return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture
def states_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What silos keep between rounds is there also once the job is over, to be looked at."""
    monkeypatch.setattr(worker_trainer, "forget_unused", lambda jobs, job: None)


@pytest.fixture
async def federation(tmp_path: Path) -> AsyncIterator[Federation]:
    """A coordinator's address, and a folder with credentials and the task."""
    async with federation_of(tmp_path, TASK) as started:
        yield started


@pytest.mark.slow
async def test_training_processes_give_the_same_model_under_secure_aggregation(
    federation: Federation,
) -> None:
    _, folder = federation
    settings = {"learning_rate": 0.3, "epochs": 2, "batch_size": 8}
    table = {"task": "toy", "rounds": 2, "cohort": {"size": 3}, "algorithm": settings}
    table["evaluation"] = {"every": 0}
    plain = JobConfig.model_validate(table)
    secure = JobConfig.model_validate(
        {**table, "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 10.0}}
    )
    up = {"up": "randomk(ratio=0.25, indices=cohort)"}
    thin = JobConfig.model_validate({**secure.model_dump(), "rounds": 1, "transfer": up})
    model = initial_model(plain, load_task("toy.py", folder))
    async with agents(*(silo(federation, name) for name in NAMES)):
        status, _, seen = await asyncio.to_thread(run_job, federation, plain, model)
        assert status == "finished"
        status, history, hidden = await asyncio.to_thread(run_job, federation, secure, model)
        assert status == "finished"
        status, _, fewer = await asyncio.to_thread(run_job, federation, thin, model)
        assert status == "finished"
    moved = (fewer.vector != model.vector).nonzero().flatten()
    assert len(moved) <= -(-model.layout.size // 4)
    assert len((moved // 4).unique()) == len(moved) > model.layout.size // 8, "one of four neighbours"
    # Equal up to rounding: 10 · 10922⁻¹ for a silo of weight 1, a 32nd of it for these.
    assert (seen.vector - hidden.vector).abs().max() < 1e-3
    assert history[0]["charge"]["examples"] == 96


STEADY = """
import torch
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return torch.nn.Linear(6, 8)
    def data(self, site):
        return (torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(site.options["seed"])),), None
    def loss(self, model, batch, context):
        from pathlib import Path
        flag = Path(__file__).with_name("failed")
        if (context.round, context.site) == (3, "cedar") and not flag.exists():
            flag.touch()
            raise ValueError("this once")
        return (model.weight * batch[0]).sum() + model.bias.sum()
"""


@pytest.mark.usefixtures("states_stay")
async def test_masked_factors_and_what_silos_remember_of_them_are_all_that_they_trained(
    federation: Federation,
) -> None:
    """Gradients that stay the same, round 3 made again: the model's way and the silos' memories add up."""
    _, folder = federation
    (folder / "toy.py").write_text(STEADY)
    table = {
        "task": "toy",
        "rounds": 5,
        "cohort": {"size": 3, "minimum": 3},
        "algorithm": {"learning_rate": 0.1, "steps": 1, "batch_size": 1},
        "aggregation": {"weighting": "uniform"},
        "evaluation": {"every": 0},
        "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 10.0},
        "transfer": {"up": "lowrank(rank=2, basis=cohort)"},
    }
    job = JobConfig.model_validate(table)
    model = initial_model(job, load_task("toy.py", folder))
    size = model.layout.model.size
    assert (size, model.layout.size) == (56, 56 + 2 * 14)
    async with agents(*(silo(federation, name) for name in NAMES)):
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert [record["attempt"] for record in history] == [1, 1, 2, 1, 1]
    remembered, trained = torch.zeros(size), torch.zeros(size)
    for place, name in enumerate(NAMES):
        (kept,) = (folder / "state" / name / "jobs").glob("*/round-5.1.safetensors")
        remembered += load_file(kept)["transfer:error"] / 3
        drawn = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(place))
        trained += -0.1 * 5 * torch.cat([drawn.flatten(), torch.ones(8)]) / 3
    moved = (final.vector - model.vector)[:size]
    assert remembered[:48].norm() > 0.1
    torch.testing.assert_close(moved + remembered, trained, rtol=0, atol=2e-3)
    basis = final.vector[final.layout.basis][2 * 6 :].view(8, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("states_stay")
async def test_three_silos_train_one_model(federation: Federation) -> None:
    _, folder = federation
    settings = {"learning_rate": 0.3, "epochs": 3, "batch_size": 8}
    table = {"task": "toy", "rounds": 4, "cohort": {"size": 3}, "algorithm": settings}
    job = JobConfig.model_validate(table)
    model = initial_model(job, load_task("toy.py", folder))
    async with agents(*(silo(federation, name) for name in NAMES)):
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert [record["contributors"] for record in history] == [sorted(NAMES)] * 4
    accuracy = history[-1]["evaluation"]["accuracy"]  # type: ignore[index]
    assert accuracy[1] == 3 * 16
    assert accuracy[0] / accuracy[1] > 0.8
    assert not torch.equal(final.vector, model.vector)
    kept = sorted((folder / "state" / "alder" / "jobs").glob("*/round-*.safetensors"))
    assert [path.stem for path in kept] == ["round-3.1", "round-4.1"]


LOSES_WHAT_ROUND_1_LEFT = """
    def metrics(self, model, batch, context):
        from pathlib import Path
        if context.site == "cedar":
            for left in Path(__file__).parent.glob("state/cedar/jobs/*/round-1.1.safetensors"):
                left.unlink()
        return {}
"""


async def test_a_silo_is_out_where_the_server_counts_on_what_it_has_lost_and_nowhere_else(
    federation: Federation,
) -> None:
    """FedExP and q-FedAvg send a number beside the update, and their clients keep nothing."""
    _, folder = federation
    (folder / "toy.py").write_text(TASK + LOSES_WHAT_ROUND_1_LEFT)
    came: dict[str, list[int]] = {}
    async with agents(*(silo(federation, name) for name in NAMES)):
        for own in ({"name": "fedexp"}, {"name": "qfedavg", "q": 1.0}, {"name": "feddyn", "alpha": 0.1}):
            table = {
                "task": "toy",
                "rounds": 2,
                "cohort": {"size": 3, "minimum": 2},
                "algorithm": {**own, "learning_rate": 0.1, "steps": 2, "batch_size": 8},
                "model": {"buffers": "local" if own["name"] == "feddyn" else "average"},
                "aggregation": {"weighting": "uniform"},
            }
            job = JobConfig.model_validate(table)
            model = initial_model(job, load_task("toy.py", folder))
            status, history, _ = await asyncio.to_thread(run_job, federation, job, model)
            assert status == "finished"
            came[str(own["name"])] = [len(record["contributors"]) for record in history]
    assert came == {"fedexp": [3, 3], "qfedavg": [3, 3], "feddyn": [3, 2]}


MASKED = {"level": "none", "secure_aggregation": True, "clip_norm": 0.2}


@pytest.mark.usefixtures("states_stay")
@pytest.mark.parametrize(
    "privacy",
    [pytest.param({"level": "none"}, marks=pytest.mark.slow), MASKED],
    ids=["plain", "masked and clipped"],
)
async def test_scaffolds_control_is_the_mean_of_what_the_silos_keep(
    federation: Federation, privacy: dict[str, Any]
) -> None:
    """Also where a round is made again: equation 5's invariant, on the silos' own disks."""
    _, folder = federation
    (folder / "toy.py").write_text(TASK + FAILS_ONCE)
    table = {
        "task": "toy",
        "rounds": 5,
        "cohort": {"size": 3, "minimum": 3},
        "algorithm": {"name": "scaffold", "learning_rate": 0.1, "steps": 3, "batch_size": 8},
        "aggregation": {"weighting": "uniform"},
        "evaluation": {"every": 0},
        "privacy": privacy,
    }
    job = JobConfig.model_validate(table)
    model = initial_model(job, load_task("toy.py", folder))
    assert model.layout.sent.size == model.layout.model.size, "c goes down and nothing goes up for it"
    async with agents(*(silo(federation, name) for name in NAMES)):
        status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    if privacy is MASKED:
        assert any(record["charge"]["clipped"] for record in history)
    assert [record["attempt"] for record in history] == [1, 1, 2, 1, 1]
    place = final.layout.places["control"]
    means = torch.zeros(final.layout.model.size)
    for name in NAMES:
        rounds = [r for r in history if name in r["contributors"]]
        newest = f"round-{rounds[-1]['round']}.{rounds[-1]['attempt']}.safetensors"
        (kept,) = (folder / "state" / name / "jobs").glob(f"*/{newest}")
        means += load_file(kept)["algorithm/control"] / len(NAMES)
    assert means.abs().max() > 0.01
    found = final.vector[place]
    for spec in final.layout.model.averaged:
        here = slice(spec.offset, spec.offset + spec.size)
        # Of running statistics c holds what nobody looks at: the server does not know which they are.
        if spec.kind == "parameter":
            torch.testing.assert_close(found[here], means[here], rtol=1e-5, atol=1e-6)
        else:
            assert not means[here].any()


def script(config: AgentConfig, seen: list[int]) -> None:
    """A user's own NumPy loop for softmax regression, evaluated by a function of its own."""
    generator = np.random.default_rng(len(config.state.name))
    x = generator.normal(size=(64, 4)).astype(np.float32)
    labels = x[:, :3].argmax(1)

    def evaluate(round: Round) -> dict[str, tuple[float, int]]:
        weights = round.arrays
        right = (x @ weights["w"] + weights["b"]).argmax(1) == labels
        return {"accuracy": (float(right.sum()), len(labels))}

    for round in join(config, evaluate=evaluate):
        seen.append(round.number)
        weights = round.arrays
        for _ in range(20):
            scores = np.exp(x @ weights["w"] + weights["b"])
            error = (scores / scores.sum(1, keepdims=True) - np.eye(3)[labels]) / len(x)
            weights["w"] -= x.T @ error
            weights["b"] -= error.sum(0)
        round.submit(weights, examples=len(x), metrics={"loss": 0.5})


async def test_scripts_of_ones_own_take_part_until_the_job_is_over(federation: Federation) -> None:
    table = {"task": "toy", "rounds": 3, "cohort": {"size": 2}}
    job = JobConfig.model_validate(table)
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(3)}
    layout = Layout.of(state)
    model = Model(layout, layout.flatten(state))
    seen: dict[str, list[int]] = {name: [] for name in NAMES[:2]}
    scripts = [asyncio.to_thread(script, silo(federation, name), rounds) for name, rounds in seen.items()]
    done = asyncio.gather(*scripts)
    status, history, _ = await asyncio.to_thread(run_job, federation, job, model)
    await done
    assert status == "finished"
    assert list(seen.values()) == [[1, 2, 3], [1, 2, 3]]
    accuracy = history[-1]["evaluation"]["accuracy"]  # type: ignore[index]
    assert accuracy[0] / accuracy[1] > 0.9
    assert history[0]["training"]["loss"][1] == 128  # type: ignore[index]


@pytest.mark.slow
async def test_a_silo_with_another_model_fails_and_the_round_goes_on(federation: Federation) -> None:
    _, folder = federation
    (folder / "wide.py").write_text(TASK.replace("nn.Linear(4, 8), nn.BatchNorm1d(8)", "nn.Linear(4, 8)"))
    odd = replace(silo(federation, "cedar"), tasks={"toy": "wide.py:Toy"})
    table = {"task": "toy", "rounds": 1, "cohort": {"size": 3, "minimum": 2}}
    job = JobConfig.model_validate(table)
    model = initial_model(job, load_task("toy.py", folder))
    async with agents(silo(federation, "alder"), silo(federation, "birch"), odd):
        status, history, _ = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert history[0]["contributors"] == ["alder", "birch"]
    failure = history[0]["failures"]["cedar"]  # type: ignore[index]
    assert "1.weight" in failure
    assert "install the version of the task" in failure
    assert str(folder) not in failure


SLOW = TASK.replace("randn(48", "randn(48 if site.options['seed'] else 48 * 150").replace(
    "(x[:32], y[:32]), (x[32:], y[32:])", "(x[:-16], y[:-16]), (x[-16:], y[-16:])"
)


async def test_a_slow_silo_holds_nobody_up_in_buffered_rounds(tmp_path: Path) -> None:
    """Alder has 150 times the data: the others' updates make models while it trains."""
    settings = {"learning_rate": 0.1, "epochs": 20, "batch_size": 8}
    table = {"task": "toy", "rounds": 8, "round": {"mode": "buffered", "buffer": 2}, "algorithm": settings}
    table["evaluation"] = {"every": 4}
    job = JobConfig.model_validate(table)
    async with federation_of(tmp_path, SLOW) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert [record["contributors"] for record in history].count(["birch", "cedar"]) >= 4
    assert not torch.equal(final.vector, model.vector)
    assert history[-1]["evaluation"]["accuracy"][1] >= 16  # type: ignore[index]


async def test_a_silo_uses_its_own_model_after_the_job_and_without_the_coordinator(tmp_path: Path) -> None:
    table = {
        "task": "toy",
        "rounds": 2,
        "cohort": {"size": 3},
        "algorithm": {"name": "ditto", "pull": 0.1, "learning_rate": 0.3, "batch_size": 8},
    }
    job = JobConfig.model_validate(table)
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, final = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    measured, own = 0.0, {}
    for number, name in enumerate(NAMES):
        agent = tmp_path / f"{name}.toml"
        agent.write_text(
            f'coordinator = "{federation[0]}"\ncredentials = "{name}"\nstate = "state/{name}"\n'
            f'[tasks]\ntoy = "toy.py:Toy"\n[data]\nseed = {number}\n[limits]\ndevice = "cpu"\nthreads = 1\n'
        )
        (folder,) = (tmp_path / "state" / name / "jobs").glob("*/order.json")
        shutil.rmtree(tmp_path / "state" / name / "models", ignore_errors=True)
        out = tmp_path / f"{name}.safetensors"
        command = ["client", "--config", str(agent), "model", folder.parent.name, "-o", str(out)]
        assert await asyncio.to_thread(run_command, [*command, "--personal"]) == 0
        own[name] = load_file(out)
        task = load_task("toy.py", tmp_path)
        module = task.model().eval()  # type: ignore[union-attr]
        module.load_state_dict(own[name])
        _, test = task.data(Site(name, options={"seed": number}))
        measured += float(task.metrics(module, test)["accuracy"][0])  # type: ignore[union-attr]
        assert await asyncio.to_thread(run_command, command) == 2, "it replaces nothing unasked"
        assert await asyncio.to_thread(run_command, [*command, "--force"]) == 0
        torch.testing.assert_close(load_file(out)["0.weight"], final.state_dict()["0.weight"])
    assert not torch.equal(own["alder"]["0.weight"], own["birch"]["0.weight"])
    assert measured == history[-1]["evaluation"]["accuracy"][0]  # type: ignore[index]
    kept = folder.with_name("model.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert await asyncio.to_thread(run_command, [*command, "--force"]) != 0, "damaged bytes are no model"
    missing = ["client", "--config", str(agent), "model", "J-none", "-o", str(tmp_path / "none")]
    assert await asyncio.to_thread(run_command, missing) != 0
    assert not (tmp_path / "none").exists()
