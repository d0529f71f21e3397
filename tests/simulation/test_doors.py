"""Code of others through `simulate`: the example of docs/extending.md, and what is refused of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from installed import install

from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.simulation import Result, describe_partition, simulate

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"
TASK = """
import numpy as np
import torch
import roundtable as rt

class Small(rt.Task):
    def model(self):
        return torch.nn.Linear(3, 1)
    def data(self, site):
        inputs = torch.linspace(-1, 1, 180).view(60, 3)[site.shard(np.arange(60) % 3)]
        return (inputs, inputs.sum(1, keepdim=True)), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
BAD = """
import torch
import roundtable as rt
from mine import Heavy

class Remembers(Heavy):
    elementwise = False
    rounds = 0
    def apply(self, state, model, delta, step):
        self.rounds += 1
        return state, model + delta / self.rounds

class InPlace(Heavy):
    def apply(self, state, model, delta, step):
        return state, model.add_(delta)

class Grows(Heavy):
    def apply(self, state, model, delta, step):
        return rt.OptimizerState({**state.vectors, "more": model}, state.scalars), model + delta

class Normed(Heavy):
    def apply(self, state, model, delta, step):
        return state, model + delta / delta.norm()

class NoApply:
    def init(self, columns): ...

class OneArgument(Heavy):
    def apply(self, state): ...

def two(names, size): ...

def stranger(names, size, chance, lookup):
    return ["nobody"] * size

def twice(names, size, chance, lookup):
    return [names[0]] * size

def fails(names, size, chance, lookup):
    return {}["lost"]

def beyond(labels, count, seed):
    return [count] * len(labels)

def half(labels, count, seed):
    return [0.5] * len(labels)

class Short(rt.ClientAlgorithm):
    def end(self, update): ...
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example's job with its code, a task, and a file of mistakes."""
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "mine.py").write_text("\n".join(blocks("python")))
    (tmp_path / "bad.py").write_text(BAD)
    # The page begins with the job; what is behind it is other files.
    (tmp_path / "job.toml").write_text(blocks("toml")[0] + "[evaluation]\nevery = 0\n")
    return tmp_path


def run(folder: Path, **overrides: object) -> Result:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return simulate(folder / "job.toml", overrides=settings)


def without(folder: Path, *lines: str) -> None:
    """Takes lines out of the job."""
    file = folder / "job.toml"
    kept = [line for line in file.read_text().splitlines() if line not in lines]
    file.write_text("\n".join(kept))


def test_the_example_of_the_docs_runs_as_it_stands(folder: Path) -> None:
    result = run(folder)
    assert result.status == "finished"
    assert all("client-5" in record.cohort for record in result.history.records)
    # Six clients of ten rows each, two by two: 0, 0, 1, 1, ..., as `striped` says.
    report = describe_partition({"name": "mine.py:striped", "width": 2}, np.zeros(60), 6, folder=folder)
    assert report.sizes.tolist() == [10] * 6


def test_an_optimizer_of_others_does_what_the_built_in_one_does_and_resumes(folder: Path) -> None:
    built_in = run(
        folder,
        aggregation__server_optimizer={"name": "fedavgm", "momentum": 0.5},
    )
    job, run_dir = folder / "job.toml", folder / "run"
    simulate(job, overrides={"rounds": 2}, run_dir=run_dir)
    resumed = simulate(job, run_dir=run_dir, resume=True)
    torch.testing.assert_close(resumed.model.vector, built_in.model.vector, rtol=1e-6, atol=1e-7)
    assert torch.equal(run(folder).model.vector, resumed.model.vector)


def test_installed_packages_give_the_same_model_as_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        "roundtable.server_optimizers": {"heavy": "Heavy"},
        "roundtable.selection_strategies": {"every_region": "every_region"},
        "roundtable.partitions": {"striped": "striped"},
        "roundtable.algorithms": {"shrinking": "Shrinking"},
        "roundtable.encodings": {"steps": "Steps"},
    }
    install(tmp_path / "site", monkeypatch, "hospital_parts", "\n".join(blocks("python")), points)
    installed = run(
        folder,
        cohort__strategy="every_region",
        algorithm__name="shrinking",
        transfer__up="steps(levels=100)",
        aggregation__server_optimizer__name="heavy",
        simulation__partition__name="striped",
    )
    assert torch.equal(installed.model.vector, run(folder).model.vector)


@pytest.mark.parametrize(
    ("up", "more"),
    [
        ("{}", {"down": "mine.py:Steps"}),
        ("{} | zstd", {"feedback": "on"}),
        ("topk(ratio=0.5) | {}", {"momentum": 0.5}),
        ("{}", {"feedback": "ef21"}),
        ("lowrank(rank=1) | {}", {}),
        ("randomk(ratio=0.5) | {}", {"privacy": {"level": "client", "clip_norm": 0.1, "delta": 1e-3}}),
    ],
)
def test_an_encoding_of_others_does_what_the_built_in_one_of_its_formula_does(
    folder: Path, up: str, more: dict[str, Any]
) -> None:
    """In each place that a chain has, with each kind of memory, and where the noise comes after it."""
    own, same = "mine.py:Steps", "int8(block=64, scales=float32)"
    job: dict[str, Any] = {
        "task": "small.py:Small",
        "rounds": 3,
        "cohort": {"size": 6, "minimum": 6},
        "algorithm": {"name": "fedavg"},
        "aggregation": {"weighting": "uniform", "validation": {"norm_ratio": "off"}},
        "simulation": {"clients": 6},
        "evaluation": {"every": 0},
    }
    (folder / "small.py").write_text(TASK.replace("Linear(3, 1)", "Linear(3, 40)"))
    transfer = dict(more)
    if privacy := transfer.pop("privacy", None):
        job["privacy"] = {**privacy, "noise_multiplier": 0.01}
    forms = [{"up": up.format(own), **transfer}, {"up": up.format(same), **transfer}, {}]
    if "down" in transfer:
        forms[1]["down"] = same
    models = []
    for form in forms:
        result = simulate(JobConfig.model_validate({**job, "transfer": form}), folder=folder)
        assert result.status == "finished", result.reason
        models.append(result.model.vector)
    torch.testing.assert_close(models[0], models[1], rtol=1e-5, atol=1e-7)
    assert not torch.equal(models[0], models[2])


OPTIMIZER, STRATEGY = "aggregation__server_optimizer", "cohort__strategy"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({f"{OPTIMIZER}__parameters": {"betta": 1}}, r"'mine.py:Heavy' .*no parameter 'betta'.* takes: beta"),
        ({f"{OPTIMIZER}__parameters": {"beta": "x"}}, r"beta must be of type float, not 'x'"),
        ({f"{OPTIMIZER}__momentum": 0.5}, r"momentum is of the built-in server optimizers"),
        ({OPTIMIZER: {"name": "fedadm"}}, r"unknown server optimizer 'fedadm'.*did you mean 'fedadam'"),
        ({OPTIMIZER: {"name": "fedadam", "parameters": {"beta": 1}}}, r"is built in and takes its keys in"),
        ({OPTIMIZER: {"name": "bad.py:NoApply"}}, r"bad.py, line 25\) has no method apply\(state, model,"),
        ({OPTIMIZER: {"name": "bad.py:OneArgument"}}, r"line 29\) takes \(self, state\); it is called with"),
        ({OPTIMIZER: {"name": "bad.py:two"}}, r"line 31\) is not a class with the methods of a Server"),
        ({OPTIMIZER: {"name": "bad.py:Remembers"}}, r"gives another answer to the same arguments"),
        ({OPTIMIZER: {"name": "bad.py:InPlace"}}, r"apply changes its arguments"),
        ({OPTIMIZER: {"name": "bad.py:Grows"}}, r"the state momentum, more, steps, and init declared mom"),
        ({OPTIMIZER: {"name": "bad.py:Normed"}}, r"says elementwise = True, and gives another answer"),
        ({STRATEGY: "bad.py:two"}, r"line 31\) takes \(names, size\); it is called with \(names, size, cha"),
        ({STRATEGY: "mine.py:every_regoin"}, r"did you mean 'every_region'"),
        ({"cohort__parameters": {"last": "x"}}, r"cohort.parameters.*no parameter 'last'; it takes: first"),
        ({STRATEGY: "uniform"}, r"'uniform' is built in and takes no parameters"),
        ({"simulation__partition": {"name": "striped"}}, r"unknown partition 'striped'"),
        ({"simulation__partition": {"name": "bad.py:beyond"}}, r"gave row 0 to client 6; .* from 0 to 5"),
        ({"simulation__partition": {"name": "bad.py:half"}}, r"gave float64 \[60\], not a whole number"),
        ({"simulation__partition": {"name": "mine.py:striped", "width": "x"}}, r"width must be of type int"),
        ({"algorithm__name": "bad.py:two"}, r"is not a subclass of roundtable.ClientAlgorithm"),
        ({"algorithm__name": "bad.py:Short"}, r"end \(.*line 49\) takes \(self, update\); it is called"),
    ],
)
def test_what_does_not_fit_is_refused_before_round_1(
    folder: Path, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, **overrides)


def test_a_table_that_cannot_be_read_is_told_where_its_file_is_run(folder: Path) -> None:
    """The tables of the package are compiled when they are first read, those of others at once."""
    (folder / "odd.py").write_text(
        "from roundtable.core.algorithms.contract import ClientAlgorithm\n"
        "from roundtable.core.algorithms.table import AlgorithmTable\n\n"
        "class Odd: pass\n\n"
        "class Mine(ClientAlgorithm):\n    class Table(AlgorithmTable):\n        odd: Odd = Odd()\n"
    )
    with pytest.raises(ConfigError, match=r"(?s)running .*odd.py failed: .*Odd.* \(odd.py, line 7, in Mine"):
        run(folder, algorithm__name="odd.py:Mine")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("{ beta = 0.5 }", "{ betta = 0.5 }", "aggregation.server_optimizer.parameters.betta"),
        ("mine.py:Heavy", "mine.py:Hevay", "aggregation.server_optimizer.name"),
        ("mine.py:every_region", "bad.py:two", "cohort.strategy"),
        ("mine.py:striped", "mine.py:strip", "simulation.partition.name"),
        ("shrink = 0.01", "shrinc = 0.01", "algorithm.shrinc"),
        ("levels=100", "levles=100", "transfer.up"),
    ],
)
def test_a_mistake_names_the_line_of_the_job_file(folder: Path, old: str, new: str, key: str) -> None:
    file = folder / "job.toml"
    file.write_text(file.read_text().replace(old, new))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if new in text)
    with pytest.raises(ConfigError, match=rf"job.toml:{line}: {key}: "):
        simulate(file)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("stranger", "it gave 'nobody', which cannot be chosen"),
        ("twice", "4 of 6 clients are wanted, and it gave 1 different ones"),
        ("fails", r"'bad.py:fails' failed: KeyError: 'lost' \(bad.py, line 40"),
    ],
)
@pytest.mark.parametrize("mode", ["synchronous", "buffered"])
def test_a_strategy_that_cannot_choose_pauses_the_job(
    folder: Path, strategy: str, reason: str, mode: str
) -> None:
    settings: dict[str, object] = {"cohort__strategy": f"bad.py:{strategy}", "cohort__parameters": {}}
    if mode == "buffered":
        without(folder, "size = 4", "shrink = 0.01")
        settings |= {
            "round": {"mode": "buffered", "buffer": 2, "concurrency": 4},
            "algorithm__name": "fedavg",
        }
    result = run(folder, **settings)
    assert result.status == "paused"
    assert re.search(reason, result.reason), result.reason
    assert not result.history.records


def test_no_privacy_is_amplified_by_a_strategy_of_others(folder: Path) -> None:
    """The charge is that of everybody in every round; a strategy that may look at silos' data is refused."""
    privacy = {"level": "client", "delta": 1e-3, "noise_multiplier": 1.0, "clip_norm": 1.0}
    without(folder, "shrink = 0.01")
    settings: dict[str, object] = {
        "algorithm__name": "fedavg",
        "aggregation__weighting": "uniform",
        "privacy": privacy,
    }
    with pytest.raises(PrivacyError, match=r"may choose by how many examples .* blind=True"):
        run(folder, **settings)
    (folder / "blind.py").write_text(
        """
import roundtable as rt
def peeks(names, size, chance, lookup):
    assert all(lookup(name).info.examples is None and lookup(name).reliability == 1.0 for name in names)
    return names[:size]

uniform = rt.SelectionStrategy(peeks, blind=True)
"""
    )
    settings |= {"cohort__strategy": "blind.py:uniform", "cohort__parameters": {}}
    foreign = run(folder, **settings)
    everybody = run(folder, **{**settings, "cohort__strategy": "round_robin"})
    amplified = run(folder, **{**settings, "cohort__strategy": "uniform"})
    charges = [result.history.records[-1].charge for result in (foreign, everybody, amplified)]
    assert charges[0]["epsilon"] == charges[1]["epsilon"]
    drawn = [json.loads(charge["charge"])["sampling"] for charge in charges]
    assert drawn == ["none", "none", "fixed_size"]
