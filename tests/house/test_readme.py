"""The README's first task, first job and first credentials work as they are written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def roundtable(folder: Path, *arguments: str) -> str:
    """Runs the command with this interpreter, as the installed script would."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "roundtable", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A folder with the two files that the README shows."""
    (tmp_path / "blobs.py").write_text(next(block for block in blocks("python") if "class Blobs" in block))
    (tmp_path / "job.toml").write_text(next(block for block in blocks("toml") if "blobs" in block))
    return tmp_path


def test_the_first_job_learns(first: Path) -> None:
    result = json.loads(roundtable(first, "simulate", "job.toml", "--json"))
    assert result["history"][-1]["accuracy"] > 0.85


def test_the_first_job_shows_its_defaults(first: Path) -> None:
    assert "batch_size" in roundtable(first, "job", "show", "--resolved", "job.toml")


def test_the_credentials_are_issued(tmp_path: Path) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("roundtable ca ")]
    assert len(commands) > 2
    for command in commands:
        roundtable(tmp_path, *command)
    assert (tmp_path / "north" / "node.key").stat().st_mode & 0o077 == 0


def test_the_agents_file_is_accepted(tmp_path: Path) -> None:
    from roundtable.client.policy.config import load_agent_config

    (tmp_path / "agent.toml").write_text(next(block for block in blocks("toml") if "coordinator" in block))
    config = load_agent_config(tmp_path / "agent.toml")
    assert config.reference_of("digits") == "digits.py"


def test_every_figure_of_the_reasons_is_on_the_page_that_is_linked() -> None:
    reasons = README.split("## Why this one")[1].split("\n## ")[0]
    lines = reasons.split("\n- ")[1:]
    assert len(lines) == 6
    checked = 0
    for line in lines:
        pages = [ROOT / page.partition("#")[0] for page in re.findall(r"\]\(([^)]+)\)", line)]
        text = "\n".join(page.read_text() for page in pages)
        for figure in re.findall(r"\b\d[\d.,]* (?:ms|s|M)\b", line):
            number = figure.split()[0]
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", text), (
                f"{figure} is on none of {pages}"
            )
            checked += 1
    assert checked >= 7


def test_the_gallery_shows_every_picture_and_names_a_script_that_is_there() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    shown = set(re.findall(r"\]\(figures/([^)]+)\)", page))
    assert shown == {file.name for file in (ROOT / "docs" / "figures").iterdir()}
    scripts = set(re.findall(r"`((?:tools|benchmarks|examples)/[^`]+)`", page))
    assert len(scripts) > 5
    assert [name for name in scripts if not (ROOT / name).is_file()] == []
