"""Jobs over the small tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundtable.core import JobConfig
from roundtable.core.toml import TomlDocument, validate
from roundtable.simulation import Result, simulate

HERE = Path(__file__).parent
BASE = """
rounds = 3
seed = 5
[cohort]
size = 5
[algorithm]
batch_size = 8
learning_rate = 0.1
epochs = 2
[simulation]
clients = 8
backend = "sequential"
"""


@pytest.fixture
def make_job() -> Callable[..., JobConfig]:
    """A job over `worlds.py:TASK`; keyword arguments are dotted keys with __ for the dot."""

    def make(task: str = "Perceptron", **overrides: Any) -> JobConfig:
        document = TomlDocument.parse(f'task = "worlds.py:{task}"\n' + BASE, "job.toml")
        for key, value in overrides.items():
            document.override(key.replace("__", "."), value)
        return validate(JobConfig, document)

    return make


@pytest.fixture
def run(make_job: Callable[..., JobConfig]) -> Callable[..., Result]:
    """Simulates such a job; arguments with a leading underscore go to `simulate`."""

    def go(task: str = "Perceptron", **overrides: Any) -> Result:
        options = {key[1:]: overrides.pop(key) for key in list(overrides) if key.startswith("_")}
        return simulate(make_job(task, **overrides), folder=HERE, **options)

    return go
