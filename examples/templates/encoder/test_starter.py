"""The job learns something, in a simulation: run it with `pytest`."""

import runpy
from pathlib import Path

import pytest

import roundtable as rt

pytest.importorskip("transformers")
pytest.importorskip("peft")

HERE = Path(__file__).parent


def test_it_learns():
    if not (HERE / "base").exists():
        runpy.run_path(str(HERE / "make_base.py"), run_name="__main__")
    result = rt.simulate(HERE / "job.toml")
    first, last = result.history[0], result.history[-1]
    assert last["loss"] < first["loss"]
    assert last["accuracy"] > 0.6  # Of three labels.
