"""`roundtable new`: what it makes runs as it is, and nothing of anybody's is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundtable.cli.main import run
from roundtable.demo import free_port
from roundtable.preparation import prepare
from roundtable.starters import BUILT_EXAMPLES, STARTERS

SIMULATED = [name for name in STARTERS if name != "script"]
QUICK = ["vision", "llm", "tabular"]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([each for each in SIMULATED if each not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_every_template_passes_the_test_that_it_brings(names: list[str], empty: Path) -> None:
    for name in names:
        assert run(["new", f"my_{name}", "--template", name]) == 0
    words = [file for file in empty.rglob("*") if file.is_file() and "starter" in file.read_text().lower()]
    assert words == []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "."],
        cwd=empty,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} passed" in done.stdout


@pytest.mark.slow
def test_the_script_s_processes_finish_their_job_and_none_stays(empty: Path) -> None:
    assert run(["new", "mine", "--template", "script"]) == 0
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "run.sh", str(free_port())],
        cwd=empty / "mine",
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is finished: all 10 rounds are done" in done.stdout
    assert str(empty) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", [name for name in BUILT_EXAMPLES if name != "second_door"])
def test_an_example_is_copied_with_a_job_that_can_be_prepared(empty: Path, name: str) -> None:
    assert run(["new", name]) == 0
    assert prepare(empty / name / "job.toml").model.layout.size > 0


def test_what_cannot_be_made_is_said_and_nothing_is_touched(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "mine").mkdir()
    (empty / "mine" / "job.toml").write_text("my own")
    for arguments, said in (
        (["mine"], "not empty"),
        (["random"], "hide the module"),
        (["ct-scans"], "'ct_scans'"),
        (["../up"], "cannot name a task"),
        ([], "say a NAME"),
    ):
        assert run(["new", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert [file.name for file in empty.rglob("*")] == ["mine", "job.toml"]
    assert (empty / "mine" / "job.toml").read_text() == "my own"


def test_the_list_names_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*STARTERS, *BUILT_EXAMPLES))
