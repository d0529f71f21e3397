"""`roundtable job diagnose` on a simulated run: who was rejected, as text, as JSON, as a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import roundtable as rt
from roundtable.core import parse_job

Command = Any
TASK = """
import torch, roundtable as rt

class Small(rt.Task):
    def model(self):
        return torch.nn.Linear(2, 1)
    def data(self, site):
        inputs = torch.randn(30, 2, generator=torch.Generator().manual_seed(site.index))
        return (inputs, inputs @ torch.tensor([[1.0], [-2.0]])), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
JOB = """
task = "small.py:Small"
rounds = 2
[evaluation]
every = 0
[aggregation]
rule = "multi_krum"
parameters = { f = 2 }
[simulation]
clients = 8
backend = "sequential"
attack = { name = "sign_flip", count = 2, scale = 3.0 }
"""


def run_of(folder: Path, job: str = JOB) -> Path:
    """The run directory of a simulation."""
    (folder / "small.py").write_text(TASK)
    rt.simulate(parse_job(job), folder=folder, run_dir=folder / "run")
    return folder / "run"


def test_the_hostile_are_named_in_the_terminal(tmp_path: Path, roundtable: Command) -> None:
    said = roundtable("job", "diagnose", run_of(tmp_path))
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "round 2 of 2: multi_krum over 8 updates"
    assert lines[1].split() == ["silo", "norm", "cosine", "distance", "influence", "contribution", "verdict"]
    rejected = [line.split()[0] for line in lines if line.rstrip().endswith("rejected by multi_krum")]
    assert len(rejected) == 2
    assert lines[-1] == (
        f"Left out, rejected or weighed down, of 2 rounds: {rejected[0]} in 2, {rejected[1]} in 2."
    )


def test_another_round_as_json_and_as_a_picture(tmp_path: Path, roundtable: Command) -> None:
    run, picture = run_of(tmp_path), tmp_path / "heat.png"
    found = json.loads(roundtable("job", "diagnose", run, "--round", "1", "--json", "--plot", picture).out)
    assert found["round"] == 1
    assert len(found["cosine"]) == 8
    assert sorted(found["verdicts"].values()) == ["rejected by multi_krum"] * 2 + ["used"] * 6
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        (JOB, ["--round", "7"], "--round 7: .* has committed 2 rounds"),
        (
            JOB.replace('rule = "multi_krum"', 'rule = "mean"').replace("parameters = { f = 2 }", ""),
            ["--plot", "heat.png"],
            r"holds no pairwise values.*set \[aggregation\] diagnosis = true",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(
    tmp_path: Path, roundtable: Command, job: str, options: list[str], message: str
) -> None:
    said = roundtable("job", "diagnose", run_of(tmp_path, job), *options)
    assert said.code == 2
    assert re.search(message, said.err)
