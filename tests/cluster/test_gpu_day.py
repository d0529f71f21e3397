"""What a GPU will be asked, rehearsed on a CPU: every phase runs, and what breaks is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def ask(root: Path, state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "gpu" / "run.py"), "--state", str(state), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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


def test_a_phase_that_breaks_has_failed_and_says_with_what(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, run; sys.argv = ['run'];"
        "print(run.run_phase('nothing', 60, pathlib.Path(sys.orig_argv[-1]), rehearse=True)['failed'])"
    )
    folder = root / "tools" / "gpu"
    asked = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=folder, check=True)
    assert "KeyError: 'nothing'" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_day_is_rehearsed(root: Path, tmp_path: Path) -> None:
    done = ask(root, tmp_path, "--rehearse")
    assert done.returncode == 0, done.stdout
    listed = ask(root, tmp_path, "--rehearse", "--list").stdout.splitlines()
    assert {line.split()[1] for line in listed} == {"passed"}, listed
