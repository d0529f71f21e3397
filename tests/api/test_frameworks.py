"""The examples of other frameworks train, where these are installed, and are short."""

from __future__ import annotations

from pathlib import Path

import pytest

import roundtable as rt

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
NEEDS = {
    "sklearn_regression": (["sklearn"], 0.85),
    "jax_network": (["sklearn", "jax", "flax", "optax"], 0.6),
    "keras_network": (["sklearn", "keras"], 0.6),
    "lightning_module": (["sklearn", "lightning"], 0.6),
    "xgboost_leaves": (["sklearn", "xgboost"], 0.7),
}


def test_every_example_is_here_and_under_sixty_lines() -> None:
    files = {file.stem: len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")}
    assert files.keys() == NEEDS.keys()
    assert max(files.values()) < 60


@pytest.mark.parametrize("name", NEEDS)
def test_the_example_trains(name: str) -> None:
    modules, least = NEEDS[name]
    for module in modules:
        pytest.importorskip(module, reason=f"{module} is installed by those who use it")
    settings = {"task.name": name, "rounds": 3, "simulation.backend": "sequential"}
    job = rt.load_job(FOLDER / "job.toml", settings)
    assert rt.simulate(job, folder=FOLDER).history[-1]["accuracy"] > least
