"""What the tests of the command line share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from roundtable.cli.main import run


@dataclass(frozen=True)
class Said:
    """What one command gave: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def roundtable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs a command line in this process, exactly as the console script does."""
    monkeypatch.delenv("ROUNDTABLE_COORDINATOR", raising=False)
    monkeypatch.delenv("ROUNDTABLE_CREDENTIALS", raising=False)

    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    # A service keeps its files to itself; this process goes on.
    before = os.umask(0o022)
    yield call
    os.umask(before)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A small sound job with its task beside it."""
    (tmp_path / "small.py").write_text(
        "import torch, roundtable as rt\n"
        "class Small(rt.Task):\n"
        "    def model(self): return torch.nn.Linear(2, 1)\n"
        "    def data(self, site): return (torch.ones(4, 2), torch.ones(4, 1)), None\n"
        "    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()\n"
    )
    path = tmp_path / "job.toml"
    path.write_text('task = "small"\nrounds = 2\n\n[cohort]\nsize = 2\n\n[simulation]\nclients = 2\n')
    return path
