"""`import roundtable as rt`: what is promised is there, and nothing heavy is loaded for it."""

from __future__ import annotations

import subprocess
import sys

import roundtable as rt

FACE = [
    "ArrayTask",
    "JobConfig",
    "OperatorClient",
    "RoundtableError",
    "Site",
    "Task",
    "__version__",
    "join",
    "load_job",
    "load_model",
    "load_task",
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


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert rt.__version__ == version("roundtable")
