"""`roundtable job export` refuses what it cannot write, in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundtable.cli.main import run
from roundtable.simulation import simulate
from roundtable.starters import BUILT_EXAMPLES


def test_a_model_of_another_task_is_no_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = BUILT_EXAMPLES["lora"].folder
    simulate(folder / "job.toml", overrides={"rounds": 1}, run_dir=tmp_path / "run", progress=False)
    words = ["job", "export", str(tmp_path / "run"), "--task", str(folder), "-o", str(tmp_path / "out")]
    assert run(words) == 2
    assert "is no rt.HuggingFaceTask" in capsys.readouterr().err
    assert run([*words, "--best"]) == 2
    (tmp_path / "run" / "history.jsonl").write_text("{")
    assert run(words) == 2
    assert "no whole run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
