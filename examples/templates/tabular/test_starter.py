"""The job learns something, in a simulation: run it with `pytest`."""

from pathlib import Path

import roundtable as rt

HERE = Path(__file__).parent


def test_it_learns():
    result = rt.simulate(HERE / "job.toml")
    first, last = result.history[0], result.history[-1]
    assert last["accuracy"] > first["accuracy"]
    assert last["accuracy"] > 0.85
