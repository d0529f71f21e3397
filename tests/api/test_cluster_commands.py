"""`roundtable client plan` and `profile` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundtable.cli.main import run
from roundtable.cluster.tools import advice, scaling
from roundtable.cluster.tools.scaling import ScalingPoint
from roundtable.cluster.train.round_reports import RoundFigures, StepReport

TASK = """
import torch
from torch import nn
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    def data(self, site):
        x = torch.randn(64, 64)
        return (x, x[:, :8]), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file beside its task, in a folder without agent.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TASK)
    path = tmp_path / "job.toml"
    path.write_text('task = "toy.py"\n[algorithm]\nbatch_size = 16\n')
    return path


def test_a_plan_is_printed_with_its_reasons(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["client", "plan", str(job), "--world", "4", "--memory", "1GiB"]) == 0
    said = capsys.readouterr().out
    assert "18,696 parameters on 4 cuda devices with 1.00 GiB each" in said
    assert "dp4, DDP, micro-batch 4, bfloat16" in said
    assert "fits" in said


def test_a_plan_for_programs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["client", "plan", str(job), "--world", "8", "--memory", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["strategy"]["mesh"]["dp"] == 8
    assert found["estimate"]["parameters"] == 4 * 18696


def test_too_little_memory_says_how_much_lacks(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["client", "plan", str(job), "--world", "1", "--memory", "10kB"]) == 1
    assert "on each device" in capsys.readouterr().err


def test_a_profile_leaves_a_trace_and_says_what_the_rules_advise(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any share of a step is above it: what is advised is of the table, by its thresholds.
    monkeypatch.setattr(advice, "WAITING", -1.0)
    assert run(["client", "profile", str(job), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "examples a second" in said
    assert "of a step is waiting for data" in said
    assert "num_workers" in said
    assert json.loads((job.parent / "trace.json").read_text())["traceEvents"]


def test_plan_and_profile_tell_a_task_the_steps_of_its_rounds_and_show_its_mistakes(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = TASK.replace("model, batch)", "model, batch, context)")
    told = told.replace(
        "        return (model", "        assert context.steps == 4, context.steps\n        return (model"
    )
    (job.parent / "toy.py").write_text(told)
    plan, profile = (
        ["client", "plan", str(job), "--world", "2", "--memory", "1GiB"],
        ["client", "profile", str(job)],
    )
    assert run(plan) == run([*profile, "--steps", "1"]) == 0
    job.write_text(job.read_text() + "steps = 7\n")
    for command in (plan, profile):
        assert run(command) == 2
        assert "does not run on the first training examples: AssertionError: 7" in capsys.readouterr().err


def test_worlds_are_numbers(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["client", "profile", str(job), "--worlds", "one"]) == 2
    assert "write numbers of ranks with commas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            TASK.replace("x = torch.randn", "x = open('gone') or torch.randn"),
            "Toy.data() does not run: FileNotFoundError",
        ),
        (
            TASK.replace("return (x, x[:, :8]), None", "return Broken(), None")
            + "class Broken(torch.utils.data.Dataset):\n    __len__ = lambda self: 8\n"
            + "    __getitem__ = lambda self, row: 1 / 0\n",
            "Toy's training data cannot be read: ZeroDivisionError: division by zero (toy.py",
        ),
        (TASK.replace(".mean()", ".mean().detach()"), "Toy's loss depends on none of the model's parameters"),
    ],
)
def test_what_a_task_gets_wrong_is_a_line(
    code: str, said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.parent / "toy.py").write_text(code)
    assert run(["client", "plan", str(job), "--world", "2", "--memory", "1GiB"]) == 2
    assert said in capsys.readouterr().err


def test_speed_over_worlds_ends_with_advice_on_the_largest(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = RoundFigures()
    figures.add(StepReport(1, 1, 8, 0.5, 1.0, 0.1, seconds=1.0, waiting=0.0, memory=1, communicating=0.5))
    report = {**figures.alone(0.0), "plan": "", "strategy": {}}
    alone = RoundFigures()
    alone.add(StepReport(1, 1, 8, 0.5, 1.0, 0.1, seconds=1.0, waiting=0.0, memory=1))
    quiet = {**alone.alone(0.0), "plan": "", "strategy": {}}
    points = [ScalingPoint(1, "one", 8.0, 1.0, 0.0, quiet), ScalingPoint(2, "two", 8.0, 0.5, 0.5, report)]
    monkeypatch.setattr(scaling, "scaling", lambda *arguments: points)
    assert run(["client", "profile", str(job), "--worlds", "1,2"]) == 0
    assert "communication: 50% of a step has a collective under way" in capsys.readouterr().out
    assert run(["client", "profile", str(job), "--worlds", "1,2", "--json"]) == 0
    assert [len(each["advice"]) for each in json.loads(capsys.readouterr().out)] == [0, 1]


@pytest.mark.slow
def test_speed_over_worlds(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["client", "profile", str(job), "--worlds", "1,2", "--steps", "4", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["world"], one["efficiency"]) == (1, 1.0)
    assert (two["world"], two["strategy"]) == (2, "dp2, DDP, micro-batch 8, float32")
    assert two["efficiency"] == pytest.approx(two["examples_per_second"] / one["examples_per_second"] / 2)
    assert 0 < two["communication"] <= 1
    assert two["report"]["steps"] == 4
    assert all(each["about"] for each in two["advice"])
