"""Sweeps and comparisons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundtable.cli.main import run as run_command
from roundtable.core.errors import ConfigError, StorageError
from roundtable.simulation import compare, grid, sweep

HERE = Path(__file__).parent


@pytest.fixture
def job_file(tmp_path, make_job):
    """A job beside its task."""
    (tmp_path / "worlds.py").write_text((HERE / "worlds.py").read_text())
    (tmp_path / "job.toml").write_text(
        'task = "worlds.py:Perceptron"\nrounds = 2\n[algorithm]\nlearning_rate = 0.1\nbatch_size = 8\n'
        '[simulation]\nclients = 4\nbackend = "sequential"\n'
    )
    return tmp_path / "job.toml"


def test_a_grid_is_every_combination():
    assert grid({"a.b": [1, 2], "c": ["x", "y"]}) == [
        {"a.b": 1, "c": "x"},
        {"a.b": 1, "c": "y"},
        {"a.b": 2, "c": "x"},
        {"a.b": 2, "c": "y"},
    ]
    with pytest.raises(ConfigError, match="a needs a list of values"):
        grid({"a": 3})


def test_a_sweep_compares_what_differs(job_file, tmp_path):
    settings = grid({"algorithm.learning_rate": [0.001, 0.3], "cohort.size": [2, 4]})
    heard = []
    result = sweep(
        job_file, settings, tmp_path / "out", progress=lambda name, said: heard.append((name, said))
    )
    assert result.settings == ["algorithm.learning_rate", "cohort.size"]
    assert [row["algorithm.learning_rate"] for row in result.rows] == [0.001, 0.001, 0.3, 0.3]
    assert result.rows[3]["accuracy"] > result.rows[1]["accuracy"]
    assert result.rows[0]["rounds"] == 2
    assert (tmp_path / "out" / "comparison.csv").read_text().startswith("run,algorithm.learning_rate,")
    assert result.plot(tmp_path / "plot.png").axes
    assert {name for name, _ in heard} == {run.name for run in result.runs}
    heard.clear()
    again = sweep(job_file, settings, tmp_path / "out", progress=lambda name, said: heard.append(said))
    assert again == result
    assert not [said for said in heard if said.kind == "round"]


def test_all_settings_are_checked_before_the_first_run(job_file, tmp_path):
    with pytest.raises(ConfigError, match=r"run 2-size=0: .*cohort\.size"):
        sweep(job_file, [{"cohort.size": 2}, {"cohort.size": 0}], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="nothing to vary"):
        sweep(job_file, [], tmp_path / "out")


def test_parameters_of_the_task_can_be_swept(job_file, tmp_path):
    result = sweep(job_file, grid({"task.hidden": [2, 5]}), tmp_path / "out")
    assert result.settings == ["task.hidden"]
    with pytest.raises(ConfigError, match=r"run 2-hiden=5: .*has no parameter 'hiden'; it takes: hidden"):
        sweep(job_file, [{"task.hidden": 3}, {"task.hiden": 5}], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(StorageError, match="holds no run"):
        compare([tmp_path])


def test_the_commands(job_file, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert run_command(["sweep", str(job_file), "--vary", "seed=1,2", "--out", out]) == 0
    said = capsys.readouterr().out
    assert "1-seed=1: 2 rounds" in said
    assert (tmp_path / "out" / "comparison.png").exists()
    written = sorted(str(path) for path in (tmp_path / "out").iterdir())
    assert any(path.endswith("comparison.csv") for path in written)
    assert run_command(["compare", *written, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seed"] for row in rows] == [1, 2]
    assert run_command(["compare", str(tmp_path / "out" / "comparison.csv")]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    (tmp_path / "runs.toml").write_text('[[run]]\n"cohort.size" = 3\n')
    assert (
        run_command(["sweep", str(job_file), "--runs", str(tmp_path / "runs.toml"), "--out", out + "2"]) == 0
    )
    assert "1-size=3" in capsys.readouterr().out
    assert run_command(["sweep", str(job_file), "--vary", "sead=[1]", "--out", out + "3"]) == 2
    assert "did you mean 'seed'" in capsys.readouterr().err
