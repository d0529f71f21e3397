"""The demonstration as a user runs it: what comes out, and that nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import roundtable as rt
from roundtable.cli.main import run
from roundtable.core import extras
from roundtable.core.errors import UnavailableError
from roundtable.demo import Demo
from roundtable.starters import BUILT_EXAMPLES

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes left over in /proc")


def _command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "roundtable", "demo", "--dir", str(folder), *options]


def _left_over(folder: Path) -> list[str]:
    """Command lines of running processes that name this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(place.parent.name) != os.getpid():
            found.append(line)
    return found


@pytest.mark.slow
def test_demo_gives_bit_for_bit_what_the_simulation_gives(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        _command(folder, "--json", "--rounds", "3"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] == 3
    assert Path(found["learning_curve"]).read_bytes().startswith(b"\x89PNG")
    assert not _left_over(folder)
    # One client after the other, as the agents train; other backends differ in the order of sums.
    alike = {"rounds": 3, "simulation.backend": "sequential"}
    simulated = rt.simulate(BUILT_EXAMPLES["digits"].folder / "job.toml", overrides=alike)
    federated, other = rt.load_model(found["model"]), simulated.model.state_dict()
    assert federated.keys() == other.keys()
    assert all(torch.equal(federated[name], other[name]) for name in federated)
    assert simulated.history[-1]["accuracy"] == found["accuracy"]


def test_what_is_missing_is_named_first_with_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = extras.find_spec
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name in ("sklearn", "alembic") else here(name)
    )
    assert run(["demo", "--dir", str(tmp_path / "demo")]) == 2
    said = capsys.readouterr()
    assert "needs alembic, sklearn: python" in said.err
    assert said.err.endswith("-m pip install 'roundtable-fl[examples,server]'\n")
    assert said.out == ""
    assert not (tmp_path / "demo").exists()
    run(["doctor", "--json"])
    [row] = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "demo"]
    assert row["state"] == "warn"
    assert "roundtable-fl[examples,server]" in row["remedy"]


@pytest.mark.slow
def test_ctrl_c_stops_every_process(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = subprocess.Popen(
        _command(folder, "--rounds", "100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "round      1/100000" in line:
            break
    # The coordinator, three agents, their training processes, and the command itself.
    assert len(_left_over(folder)) >= 5
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "All processes are stopped" in err
    assert "Traceback" not in err
    assert not _left_over(folder)


@pytest.mark.slow
def test_a_failure_stops_every_process(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    running: list[str] = []

    def fail(operator: object, job: str) -> None:
        running.extend(_left_over(folder))
        raise UnavailableError("the network is gone")

    with pytest.raises(UnavailableError, match="the network is gone"):
        Demo(folder).run(fail, lambda sentence: None)
    assert len(running) >= 4
    assert not _left_over(folder)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = subprocess.run(_command(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "choose another --dir" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_the_whole_demo_learns_as_well_as_central_training(tmp_path: Path) -> None:
    done = subprocess.run(_command(tmp_path / "demo"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "test accuracy" in line]
    federated, centralised = (float(line.split("accuracy")[1].split()[0]) for line in lines)
    assert federated >= 0.95
    assert abs(centralised - federated) < 0.03
    assert "load_state_dict" in done.stdout
