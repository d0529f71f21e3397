"""What a GPU will be asked, rehearsed on a CPU: every phase runs, and what breaks is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def command(root: Path, state: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(root / "tools" / "gpu" / "run.py"), "--state", str(state), *arguments]


def ask(root: Path, state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, state, *arguments), capture_output=True, text=True, check=False)


def text_of(file: Path) -> str:
    try:
        return file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_a_phase_is_rehearsed_kept_and_not_run_twice(root: Path, tmp_path: Path) -> None:
    done = ask(root, tmp_path, "--rehearse", "--phase", "aggregation")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "rehearsal" / "gpu.md").read_text()
    assert "| krum | the same bytes" in page
    assert "Not run." in page
    listed = ask(root, tmp_path, "--rehearse", "--list").stdout.splitlines()
    assert [line.split()[1] for line in listed if line.startswith("aggregation")] == ["passed"]
    state = json.loads((tmp_path / "rehearsal" / "state.json").read_text())
    assert list(state["phases"]) == ["aggregation"]


@pytest.mark.slow
def test_a_phase_that_breaks_has_failed_and_says_with_what(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, run; sys.argv = ['run'];"
        "print(run.run_phase('nothing', 60, pathlib.Path(sys.orig_argv[-1]), rehearse=True)['failed'])"
    )
    folder = root / "tools" / "gpu"
    asked = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=folder, check=True)
    assert "KeyError: 'nothing'" in done.stdout


def test_without_a_gpu_each_phase_says_why_it_cannot_run(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command(root, tmp_path, "--page", str(page)), capture_output=True, text=True, check=False, env=hidden
    )
    assert done.returncode == 2
    *phases, last = done.stderr.splitlines()
    assert len(phases) == 9
    assert all("cannot run" in line and f"torch {torch.__version__}" in line for line in phases)
    assert "--rehearse" in last
    assert not page.exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_its_phase_and_goes_on_later(root: Path, tmp_path: Path) -> None:
    wanted = ("--rehearse", "--phase", "aggregation", "simulation")
    with subprocess.Popen(command(root, tmp_path, *wanted), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        next(line for line in running.stdout if line.startswith("simulation: "))
        running.terminate()
        rest = running.stdout.read()
    assert (running.returncode, "goes on with simulation" in rest) == (130, True), rest
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in text_of(each)]
    state = json.loads((tmp_path / "rehearsal" / "state.json").read_text())
    assert list(state["phases"]) == ["aggregation"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_day_is_rehearsed(root: Path, tmp_path: Path) -> None:
    done = ask(root, tmp_path, "--rehearse")
    assert done.returncode == 0, done.stdout
    listed = ask(root, tmp_path, "--rehearse", "--list").stdout.splitlines()
    assert {line.split()[1] for line in listed} == {"passed"}, listed
