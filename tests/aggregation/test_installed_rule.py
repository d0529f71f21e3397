"""A rule of somebody else's, installed as a package of its own: found by name, from Python and from a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "hospital-rules"
version = "1.0"
[project.entry-points."roundtable.aggregation_rules"]
first_silo = "hospital_rules:first_silo"
[tool.setuptools]
py-modules = ["hospital_rules"]
"""
RULE = """
import numpy as np
from roundtable.aggregation import combine

def first_silo(matrix, weights, *, scale: float = 1.0):
    return combine(matrix, np.eye(matrix.rows)[0] * scale)
"""
JOB = """
task = "small.py:Small"
rounds = 1
[evaluation]
every = 0
[aggregation]
rule = "first_silo"
parameters = { scale = 0.5 }
[simulation]
clients = 3
backend = "sequential"
"""
TASK = """
import torch, roundtable as rt

class Small(rt.Task):
    def model(self):
        return torch.nn.Linear(2, 1)
    def data(self, site):
        inputs = torch.randn(30, 2, generator=torch.Generator().manual_seed(site.index))
        return (inputs, inputs.sum(1, keepdim=True)), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed, as pip does it."""
    source = tmp_path_factory.mktemp("source")
    (source / "pyproject.toml").write_text(PACKAGE)
    (source / "hospital_rules.py").write_text(RULE)
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


def test_a_job_uses_an_installed_rule(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB)
    said = command(installed, tmp_path, "simulate", "job.toml", "--run-dir", "run")
    assert said.returncode == 0, said.stderr
    record = json.loads((tmp_path / "run" / "history.jsonl").read_text())["record"]
    assert record["diagnosis"]["rule"] == "first_silo"


def test_a_job_uses_a_rule_of_a_file_beside_it(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "mine.py").write_text(RULE)
    (tmp_path / "job.toml").write_text(JOB.replace('"first_silo"', '"mine.py:first_silo"'))
    said = command(installed, tmp_path, "simulate", "job.toml", "--run-dir", "run")
    assert said.returncode == 0, said.stderr
    record = json.loads((tmp_path / "run" / "history.jsonl").read_text())["record"]
    assert record["diagnosis"]["rule"] == "mine.py:first_silo"
    checked = command(installed, tmp_path, "job", "check", "job.toml")
    assert checked.returncode == 0, checked.stderr
    assert "It can only be simulated: mine.py:first_silo is code beside the job" in checked.stdout


@pytest.mark.slow
def test_its_parameters_are_checked_with_the_job_file(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB.replace("scale = 0.5", "size = 3"))
    said = command(installed, tmp_path, "job", "check", "job.toml")
    assert said.returncode == 2
    assert "'first_silo' has no parameter 'size'; it takes: scale" in said.stderr


@pytest.mark.slow
def test_without_the_package_the_rule_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB)
    said = command(None, tmp_path, "job", "check", "job.toml")
    assert "unknown aggregation rule 'first_silo'" in said.stderr


def command(path: Path | None, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with `path` among its packages."""
    places = [*([str(path)] if path else []), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    return subprocess.run(
        [sys.executable, "-m", "roundtable", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
