"""Sweeps and comparisons."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundtable.cli.main import run as run_command
from roundtable.core import load_task
from roundtable.core.errors import ConfigError, StorageError
from roundtable.simulation import ValueRange, compare, draw, grid, halving, sweep
from roundtable.simulation.settings_search import rungs

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


def test_a_round_that_a_kill_tore_is_left_out_as_resuming_does(job_file, tmp_path, capsys):
    whole = sweep(job_file, [{"rounds": 3}], tmp_path / "whole").runs[0].history.records
    out = tmp_path / "out"
    sweep(job_file, [{"seed": 0}, {"seed": 1}], out)
    torn = out / "1-seed=0"
    history = torn / "history.jsonl"
    lines = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(b"".join(lines) + lines[1][: len(lines[1]) // 2])
    assert run_command(["compare", str(torn), str(out / "2-seed=1"), "--json"]) == 0
    said = capsys.readouterr()
    assert [row["rounds"] for row in json.loads(said.out)] == [2, 2]
    assert said.err.startswith(f"1-seed=0: line 3 of {history} left out: ")
    rates = [{"seed": 0}, {"seed": 1}]
    place = tmp_path / "search"
    (first, _) = halving(job_file, rates, place, "loss", eta=2, fixed={"rounds": 2}).runs
    (place / first.name / "history.jsonl").open("ab").write(b'{"record": {"rou')
    again = halving(job_file, rates, place, "loss", eta=2, fixed={"rounds": 3}).runs
    assert (again[0].name, len(again[0].history), again[0].left_out) == (first.name, 3, "")
    if first.name.endswith("seed=0"):
        assert again[0].history.records == whole
    history.write_bytes(lines[0] + lines[1][:99])
    with pytest.raises(StorageError, match="holds no run that can be read"):
        compare([torn])
    with pytest.raises(StorageError, match="holds no run: no "):
        compare([torn / "state"])
    shutil.rmtree(torn / "state")
    assert len(compare([torn]).runs[0].history) == 1


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


def test_runs_side_by_side_give_the_same_and_show_mean_and_deviation(job_file, tmp_path, capsys):
    varied = ["--vary", "cohort.size=2,4", "--seeds", "2", "--set", "rounds=3"]
    assert run_command(["sweep", str(job_file), *varied, "--out", str(tmp_path / "one")]) == 0
    assert "4 of 4  4-size=4,seed=1: 3 rounds" in capsys.readouterr().out
    again = [*varied, "--jobs", "2", "--json", "--out", str(tmp_path / "two")]
    assert run_command(["sweep", str(job_file), *again]) == 0
    rows = json.loads(capsys.readouterr().out)
    one, two = (compare(sorted((tmp_path / name).glob("?-*"))) for name in ("one", "two"))
    assert [run.history.records for run in one.runs] == [run.history.records for run in two.runs]
    assert [(row["cohort.size"], row["runs"]) for row in rows] == [(2, 2), (4, 2)]
    found = [run.history[-1]["accuracy"] for run in one.runs[:2]]
    assert rows[0]["accuracy"] == pytest.approx([statistics.fmean(found), statistics.stdev(found)])
    figure = one.plot(over="seed")
    (axis,) = (axis for axis in figure.axes if axis.get_ylabel() == "accuracy")
    assert [line.get_label() for line in axis.lines] == ["size 2", "size 4"]
    assert len(axis.collections) == 2, "a band for each"
    with pytest.raises(ConfigError, match="no two of these runs differ in 'rounds'"):
        one.over("rounds")


@pytest.mark.slow
def test_a_run_that_fails_is_told_with_its_reason_and_the_others_go_on(job_file, tmp_path, capsys):
    """One pauses, one is refused before round 1, one goes through; side by side, and taken up in turn."""
    out = tmp_path / "out"
    (tmp_path / "runs.toml").write_text(
        '[[run]]\n"cohort.size" = 3\n"simulation.dropouts" = { crash_training = 1.0 }\n'
        '[[run]]\n"cohort.size" = 9\n[[run]]\n"cohort.size" = 4\n'
    )
    asked = ["sweep", str(job_file), "--runs", str(tmp_path / "runs.toml"), "--out", str(out)]
    assert run_command([*asked, "--json", "--jobs", "3"]) == 1
    paused, refused, done = json.loads(capsys.readouterr().out)
    assert (paused["rounds"], refused["rounds"], done["rounds"]) == (0, 0, 2)
    assert "round 1 failed" in paused["failed"]
    assert "cohort.size = 9 asks for more clients" in refused["failed"]
    assert (done["failed"], done["accuracy"] > 0, "simulation.workers" in done) == (None, True, False)
    assert run_command(asked) == 1
    said = capsys.readouterr().out
    assert "1-size=3,dropouts=_crash_training_1.0: failed after 0 rounds: round 1 failed" in said
    assert said.splitlines()[-3].split()[0].startswith("1-size=3")
    assert "round 1 failed" in said.splitlines()[-3]
    left = sorted(str(path) for path in out.iterdir() if path.is_dir())
    assert run_command(["compare", *left, "--json"]) == 0
    assert [bool(row["failed"]) for row in json.loads(capsys.readouterr().out)] == [True, False]


def test_a_failed_run_is_in_no_mean_and_goes_no_further_in_a_search(job_file, tmp_path):
    broken = {"simulation.dropouts": {"crash_training": 1.0}}
    settings = [{"seed": 1}, {"seed": 2}, {"seed": 3, **broken}]
    heard = []
    found = sweep(job_file, settings, tmp_path / "out", done=heard.append)
    assert [run.failed == "" for run in heard] == [True, True, False]
    (row,) = found.by()
    assert (row["runs"], list(row["failed"])) == (3, [heard[2].name])
    assert row["loss"][0] == pytest.approx(statistics.fmean(run.history[-1]["loss"] for run in heard[:2]))
    rates = [{"algorithm.learning_rate": rate} for rate in (0.3, 0.03)]
    trials = [{**broken, "algorithm.learning_rate": 0.1}, *rates]
    searched = halving(job_file, trials, tmp_path / "search", "loss", eta=2, fixed={"rounds": 2})
    assert [len(run.history) for run in searched.runs] == [2, 1, 0]
    assert list(searched.failed) == [searched.runs[2].name]
    none = halving(job_file, [{**broken, **rate} for rate in rates], tmp_path / "none", "loss", eta=2)
    assert len(none.failed) == 2


@pytest.mark.slow
def test_a_task_that_cannot_be_read_leaves_no_folder_and_is_named(job_file, tmp_path):
    (tmp_path / "worlds.py").write_text("raise ValueError('broken')")
    found = sweep(job_file, [{"cohort.size": 2}, {"cohort.size": 4}], tmp_path / "out", at_once=2)
    assert all("broken" in why for why in found.failed.values())
    assert [run.job["cohort"]["size"] for run in found.runs] == [2, 4]


@pytest.mark.slow
def test_a_task_that_only_this_process_has_goes_to_runs_side_by_side(job_file, tmp_path):
    class Steeper(type(load_task("worlds.py:Perceptron", HERE))):
        def loss(self, model, batch):
            return super().loss(model, batch) * self.times

    task, settings = Steeper(), [{"cohort.size": 2}, {"cohort.size": 4}]
    task.times = 3.0
    one, two = (sweep(job_file, settings, tmp_path / str(n), task, at_once=n) for n in (1, 2))
    assert [run.history.records for run in one.runs] == [run.history.records for run in two.runs]
    assert (
        one.runs[0].history.records
        != sweep(job_file, settings[:1], tmp_path / "plain").runs[0].history.records
    )
    task.log = (tmp_path / "log").open("w")
    with pytest.raises(ConfigError, match=r"Steeper.log cannot be carried .*one after the other"):
        sweep(job_file, settings, tmp_path / "never", task, at_once=2)


@given(
    kind=st.sampled_from(["uniform", "log", "int"]),
    ends=st.tuples(st.integers(1, 50), st.integers(51, 200)),
    share=st.floats(0, 1, exclude_max=True),
)
def test_a_range_holds_its_values_and_both_ends(kind, ends, share):
    axis = ValueRange(kind, *ends)
    assert ends[0] <= axis.at(share) <= ends[1]
    assert (axis.at(0.0), isinstance(axis.at(share), int)) == (ends[0], kind == "int")
    assert axis.at(1 - 1e-9) == pytest.approx(ends[1], rel=1e-3)
    with pytest.raises(ConfigError, match="the first end lies below the second"):
        ValueRange(kind, ends[1], ends[0])


def test_more_trials_begin_with_those_of_fewer_and_the_shares_are_even():
    axes = {"a": ValueRange("log", 1e-4, 1.0), "b": ["x", "y"], "c": ValueRange("int", 1, 4)}
    many = draw(axes, 400, seed=3)
    assert draw(axes, 20, seed=3) == many[:20]
    assert draw(axes, 20, seed=4) != many[:20]
    assert draw({"c": axes["c"]}, 5, seed=3) == [{"c": each["c"]} for each in many[:5]]
    assert statistics.fmean(math.log10(each["a"]) for each in many) == pytest.approx(-2.0, abs=0.2)
    for key, values in (("b", "xy"), ("c", [1, 2, 3, 4])):
        counts = [sum(each[key] == value for each in many) for value in values]
        assert min(counts) > 0.7 * 400 / len(values)


@pytest.mark.parametrize(
    ("rounds", "trials", "eta", "least", "expected"),
    [
        (81, 81, 3, 1, [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)]),
        (10, 8, 2, 1, [(8, 2), (4, 3), (2, 5), (1, 10)]),
        (9, 20, 3, 3, [(20, 3), (6, 9)]),
        (5, 2, 3, 1, [(2, 5)]),
    ],
)
def test_the_rungs_of_successive_halving(rounds, trials, eta, least, expected):
    assert rungs(rounds, trials, eta, least) == expected


def test_halving_goes_on_with_the_best_and_decides_alike_when_called_again(job_file, tmp_path, capsys):
    rates = [{"algorithm.learning_rate": rate} for rate in (1e-5, 0.3, 1e-4, 0.03)]
    found = halving(job_file, rates, tmp_path / "one", "accuracy", eta=2, fixed={"rounds": 4})
    rounds = {run.name[:4]: len(run.history) for run in found.runs}
    assert sorted(rounds.values()) == [1, 1, 2, 4]
    assert [len(run.history) for run in found.runs] == [4, 2, 1, 1]
    (best,) = (run for run in found.runs if len(run.history) == 4)
    whole = sweep(job_file, rates, tmp_path / "whole", fixed={"rounds": 4})
    (same,) = (run for run in whole.runs if run.name.endswith(best.name[4:]))
    assert same.history.records[-1].model == best.history.records[-1].model, "as if it had never stopped"
    by_first = sorted(whole.runs, key=lambda run: -run.history["accuracy"][0])
    went_on = {run.name[5:] for run in found.runs if len(run.history) > 1}
    assert went_on == {run.name[2:] for run in by_first[:2]}

    def nothing(run):
        raise AssertionError(f"{run.name} ran again")

    again = halving(job_file, rates, tmp_path / "one", "accuracy", eta=2, fixed={"rounds": 4}, done=nothing)
    assert [run.name for run in again.runs] == [run.name for run in found.runs]
    with pytest.raises(ConfigError, match="no run has measured 'acuracy'; there are round"):
        halving(job_file, rates, tmp_path / "one", "acuracy", eta=2, fixed={"rounds": 4})
    with pytest.raises(ConfigError, match="leave rounds out of what varies"):
        halving(job_file, [{"rounds": 3}], tmp_path / "one", "accuracy")
    private = {"privacy.level": "client", "privacy.clip_norm": 1.0, "privacy.epsilon": 8.0}
    private |= {"privacy.delta": 1e-3, "aggregation.weighting": "uniform", "evaluation.every": 0}
    with pytest.raises(ConfigError, match=r"halving and \[privacy\]"):
        halving(job_file, rates, tmp_path / "one", "accuracy", fixed=private)
    over_all = {"algorithm.schedule": "cosine", "algorithm.schedule_over": "job"}
    with pytest.raises(ConfigError, match=r'another one than .*schedule_over = "job" spreads'):
        halving(job_file, [{**each, **over_all} for each in rates], tmp_path / "two", "accuracy", eta=2)


def test_a_search_by_command_goes_on_and_groups_are_compared(job_file, tmp_path, capsys):
    out = tmp_path / "out"
    space = ["--vary", "algorithm.learning_rate=log(1e-4, 1)", "--vary", "cohort.size=2,4"]
    assert run_command(["sweep", str(job_file), *space, "--trials", "2", "--out", str(out)]) == 0
    first = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert [name[:5] for name in first] == ["0001-", "0002-"]
    search = ["--trials", "4", "--halving", "loss", "--eta", "2", "--json", "--out", str(out)]
    assert run_command(["sweep", str(job_file), *space, *search]) == 0
    rows = json.loads(capsys.readouterr().out.partition("[")[2].join(["[", ""]))
    assert {row["run"] for row in rows} > set(first)
    folders = [str(path) for path in out.iterdir()]
    assert run_command(["compare", *folders, "--by", "cohort.size", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert (sum(row["runs"] for row in groups), {row["cohort.size"] for row in groups}) == (4, {2, 4})
    assert run_command(["compare", *folders, "--by", "cohort.size", "--over", "seed"]) == 2
    assert run_command(["sweep", str(job_file), *space, "--out", str(out)]) == 2
    assert "say how many --trials" in capsys.readouterr().err
    assert run_command(["sweep", str(job_file), "--vary", "seed=log(1, x)", "--out", str(out)]) == 2
    assert "two numbers" in capsys.readouterr().err
