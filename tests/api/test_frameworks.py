"""The examples of other frameworks train, where these are installed, and are short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import roundtable as rt

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
NEEDS = {
    "sklearn_regression": (["sklearn"], 0.85),
    "jax_network": (["sklearn", "jax", "flax", "optax"], 0.6),
    "keras_network": (["sklearn", "keras"], 0.6),
    "lightning_module": (["sklearn", "lightning"], 0.6),
    "xgboost_bagging": (["sklearn", "xgboost"], 0.8),
    "xgboost_leaves": (["sklearn", "xgboost"], 0.7),
}


def test_every_example_is_here_and_under_sixty_lines() -> None:
    files = {file.stem: len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")}
    assert files.keys() == NEEDS.keys()
    assert max(files.values()) < 60


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_keras_trains_on_each_of_its_backends(backend: str, tmp_path: Path) -> None:
    for module in ("sklearn", "keras", backend):
        pytest.importorskip(module, reason=f"{module} is installed by those who use it")
    given = ("task.name=keras_network", "rounds=3", "simulation.backend=sequential")
    line = ["simulate", str(FOLDER / "job.toml"), "--json", *(f"--set={each}" for each in given)]
    # Keras takes its backend when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "roundtable", *line],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["history"][-1]["accuracy"] > NEEDS["keras_network"][1]


@pytest.mark.parametrize("name", NEEDS)
def test_the_example_trains(name: str) -> None:
    modules, least = NEEDS[name]
    for module in modules:
        pytest.importorskip(module, reason=f"{module} is installed by those who use it")
    settings = {"task.name": name, "rounds": 3, "simulation.backend": "sequential"}
    job = rt.load_job(FOLDER / "job.toml", settings)
    assert rt.simulate(job, folder=FOLDER).history[-1]["accuracy"] > least
