"""`import roundtable as rt`: what is promised is there, and nothing heavy is loaded for it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import roundtable as rt
from roundtable import aggregation, core, simulation
from roundtable.core.errors import StorageError

FACE = [
    "AlgorithmPlace",
    "AlgorithmTable",
    "ArrayTask",
    "Candidate",
    "ClientAlgorithm",
    "ClientRound",
    "Codec",
    "Composition",
    "Context",
    "EncodingError",
    "GradientWork",
    "HuggingFaceClassifier",
    "HuggingFaceTask",
    "JobConfig",
    "LocalStep",
    "Moved",
    "OperatorClient",
    "OptimizerState",
    "OwnAnalysis",
    "OwnForm",
    "OwnSum",
    "RoundtableError",
    "RuleResult",
    "SelectionStrategy",
    "Sent",
    "ServerAlgorithm",
    "ServerRound",
    "Site",
    "SurveyAnswers",
    "TarShards",
    "Task",
    "Traits",
    "__version__",
    "analyse",
    "flower_app",
    "flower_client",
    "join",
    "load_adapter",
    "load_job",
    "load_model",
    "load_survey",
    "load_task",
    "metrics",
    "nvflare_script",
    "simulate",
]


def test_the_face_is_exactly_this() -> None:
    assert rt.__all__ == FACE
    assert dir(rt) == sorted(FACE)
    for name in FACE:
        assert getattr(rt, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(rt, "nonsense")


def test_import_and_help_load_nothing_heavy() -> None:
    code = (
        "import sys, roundtable\n"
        "from roundtable.cli.main import run\n"
        "assert run(['job', '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'grpc', 'sqlalchemy', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def path_parameters(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """(parameter, annotation) of what stands for the path of a file or folder."""
    for name, parameter in inspect.signature(function).parameters.items():
        if re.search(r"Path\b", str(parameter.annotation)):
            yield name, str(parameter.annotation)


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in (rt, aggregation, core, simulation):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield name, value
            for method, function in inspect.getmembers(value, inspect.isfunction):
                constructs = method == "__init__" and not is_dataclass(value)
                if inspect.isclass(value) and (constructs or not method.startswith("_")):
                    yield f"{name}.{method}", function


def test_every_public_function_takes_a_path_as_text_too() -> None:
    taking = {
        (name, parameter): annotation
        for name, function in public_callables()
        for parameter, annotation in path_parameters(function)
    }
    assert ("load_job", "path") in taking
    assert ("History.to_csv", "path") in taking
    assert ("OperatorClient.__init__", "credentials") in taking
    assert ("OperatorClient.submit", "model") in taking
    narrow = {key: annotation for key, annotation in taking.items() if "AnyPath" not in annotation}
    assert not narrow


def test_files_named_by_text_are_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('task = "nothing"\n')
    assert rt.load_job(str(tmp_path / "job.toml")).task.name == "nothing"
    empty = simulation.History((), ())
    assert empty.to_csv(str(tmp_path / "history.csv")) == (tmp_path / "history.csv").read_text()
    with pytest.raises(StorageError, match="holds no run"):
        simulation.compare([str(tmp_path)])
