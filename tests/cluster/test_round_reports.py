"""A round's figures: put together over steps, ranks and rounds, kept at the silo, and what they advise."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundtable.cli.main import run
from roundtable.cluster.tools.advice import advise, whole_job
from roundtable.cluster.train import round_reports
from roundtable.cluster.train.round_reports import RoundFigures, StepReport, kept_reports

AGENT = """
coordinator = "localhost:1"
credentials = "alder"
[tasks]
t = "t.py:T"
"""


def step(**values: Any) -> StepReport:
    plain = {"step": 1, "steps": 9, "examples": 8, "loss": 1.0, "norm": 1.0, "learning_rate": 0.1}
    return StepReport(
        **{**plain, "seconds": 1.0, "waiting": 0.0, "memory": 100, "communicating": 0.1, **values}
    )


def report(*steps: StepReport, number: int = 1, memory_limit: float = 160.0, **plan: Any) -> dict[str, Any]:
    figures = RoundFigures()
    for each in steps:
        figures.add(each)
    return {**figures.alone(memory_limit), "round": number, "plan": "one device", "strategy": plan}


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=30), st.integers(1, 29))
def test_rounds_put_together_are_all_their_steps(seconds: list[float], cut: int) -> None:
    cut = min(cut, len(seconds) - 1)
    halves = [report(*(step(seconds=value) for value in part)) for part in (seconds[:cut], seconds[cut:])]
    found = whole_job(halves)["seconds"]
    assert math.isclose(found["mean"], statistics.fmean(seconds), rel_tol=1e-9)
    assert math.isclose(found["deviation"], statistics.pstdev(seconds), rel_tol=1e-6, abs_tol=1e-9)
    assert (found["least"], found["most"]) == (min(seconds), max(seconds))


@given(st.lists(st.lists(st.none() | st.floats(0.01, 1.0), min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_figure_that_some_steps_lack_is_the_mean_of_those_that_have_it(
    rounds: list[list[float | None]],
) -> None:
    """As time in communication, which is known from a job's third step on."""
    found = whole_job([report(*(step(communicating=value) for value in each)) for each in rounds])
    there = [value for each in rounds for value in each if value is not None]
    if not there:
        assert found["communicating"] is None
        return
    told = found["communicating"]
    assert told["steps"] == len(there)
    assert math.isclose(told["mean"], statistics.fmean(there), rel_tol=1e-9)
    assert math.isclose(told["deviation"], statistics.pstdev(there), rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("about", "planted"),
    [
        ("memory", report(step(memory=155))),
        ("memory", report(step(memory=40), checkpointing="every")),
        ("communication", report(step(communicating=0.5))),
        ("data", report(step(waiting=0.4))),
        ("device", report(step(utilisation=0.1))),
        ("steps", report(step(seconds=0.1), step(seconds=3.0), step(seconds=0.1))),
    ],
)
def test_each_rule_says_what_stands_out_and_nothing_else(about: str, planted: dict[str, Any]) -> None:
    assert [hint.about for hint in advise(planted)] == [about]


def test_nothing_is_advised_where_nothing_stands_out_or_was_measured() -> None:
    assert advise(report(step(utilisation=0.45))) == []
    assert advise(report(step(communicating=None), memory_limit=0.0)) == []
    assert advise(report()) == []


def test_a_rank_that_waits_for_its_data_is_named() -> None:
    told = report(step(waiting=0.08))
    for waits, slowest in [((0.01, 0.01, 0.3, 0.01), 2), ((0.3, 0.01), 0)]:
        told["ranks"] = [{"memory": 1, "waiting": wait, "seconds": 1.0} for wait in waits]
        assert [hint.found.split(" waits")[0] for hint in advise(told)] == [f"rank {slowest}"]


def test_old_rounds_and_old_jobs_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_reports, "_ROUNDS_KEPT", 3)
    monkeypatch.setattr(round_reports, "_JOBS_KEPT", 2)
    for number in range(1, 7):
        round_reports.keep_report(tmp_path, "job-1", {"round": number})
    assert [each["round"] for each in kept_reports(tmp_path, "job-1")] == [4, 5, 6]
    file = tmp_path / "rounds" / "job-1.jsonl"
    file.write_text(file.read_text() + '{"round": 7, "st')
    assert [each["round"] for each in kept_reports(tmp_path, "job-1")] == [4, 5, 6], "cut off by a power cut"
    for job in ("job-2", "job-3"):
        round_reports.keep_report(tmp_path, job, {"round": 1})
    assert sorted(path.stem for path in file.parent.iterdir()) == ["job-2", "job-3"]


def test_the_silo_reads_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.toml").write_text(AGENT)
    assert run(["client", "report", "job-1"]) == 2
    assert "no round of 'job-1' has been trained on this silo's cluster" in capsys.readouterr().err
    assert run(["client", "report", "../job-1"]) == 2
    from roundtable.client.policy.config import load_agent_config

    folder = load_agent_config(tmp_path / "agent.toml").state / "cluster"
    capsys.readouterr()
    for number in (1, 2):
        round_reports.keep_report(folder, "job-1", report(step(waiting=0.4), number=number))
    assert run(["client", "report", "job-1"]) == 0
    said = capsys.readouterr().out
    assert "data: 40% of a step is waiting for data" in said
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["round", "1", "2", "job"]
    assert run(["client", "report", "job-1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told["job"]["rounds"], told["advice"][0]["about"]] == [2, "data"]
