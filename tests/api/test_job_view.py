"""A job as `roundtable job show` prints it."""

from __future__ import annotations

import ast
import io
import json
import time
from pathlib import Path

import click
import pytest

from roundtable.cli.jobs.job import _file_named
from roundtable.cli.jobs.job_view import loading_lines, measured_by_silo, print_detail
from roundtable.cli.jobs.watch import JsonLines, Live, PlainLines, progress_panel
from roundtable.cli.shared.output import as_dict, confirm
from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.proto.common_pb2 import Event
from roundtable.proto.operator_pb2 import ClientActivity, Job, JobDetail, JobPrivacy, JobUpdate


def test_faults_are_shown_with_what_was_done_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    incident = {
        "kind": "out_of_memory",
        "severity": "error",
        "action": "the round goes on without this silo",
        "advice": "set a smaller batch_size",
    }
    detail = JobDetail(
        job=Job(id="abc", name="digits", status="running", rounds=5, rounds_done=1, submitted=now),
        round=2,
        attempt=1,
        waiting_for="1 of 2 updates; waiting for alder (training)",
        clients=[ClientActivity(client="alder", state="training", since=now - 90)],
        incidents=[
            Event(
                time=now - 30,
                kind="client_failed",
                round=2,
                client="birch",
                message="birch failed in round 2: no room",
                detail=json.dumps({"kind": "out_of_memory", "incident": incident}),
            )
        ],
    )
    print_detail(detail)
    said = capsys.readouterr().out
    assert "waiting for alder (training)" in said
    for word in (
        "alder",
        "training",
        "out_of_memory",
        "error",
        "birch",
        "the round goes on without this silo",
    ):
        assert word in said
    assert "birch failed in round 2: no room" in said
    assert "set a smaller batch_size" in said


HOSTILE = "[/b][red]\x1b]52;c;cm0gLXJm\x07\x1b[2J\u202e\nroot@coordinator# "


def test_hostile_words_are_plain_text_in_every_view(capsys: pytest.CaptureFixture[str]) -> None:
    sums = {HOSTILE: [1.0, 1], "loss": [1.0, 1]}
    record = {"round": 1, "training": sums, "evaluation": sums, "before": sums}
    record |= {"cohort": ["a"], "contributors": ["a"]}
    detail = JobDetail(
        job=Job(id="abc", name=HOSTILE, status="running", reason=HOSTILE, submitter=HOSTILE, rounds=5),
        phase=HOSTILE,
        waiting_for=HOSTILE,
        clients=[ClientActivity(client=HOSTILE, state=HOSTILE, note=HOSTILE, total=5, done=1)],
        history=[json.dumps({**record, "started": 0.0, "ended": 1.0, "charge": {}})],
    )
    event = Event(time=1.0, kind="note", client=HOSTILE, message=HOSTILE, detail="{}")
    update = JobUpdate(detail=detail, events=[event])
    print_detail(detail)
    for display in (JsonLines(), PlainLines(), Live()):
        display.show(update)
        display.close()
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert "[/b][red]" in said
    assert not [line for line in said.splitlines() if line.startswith("root@")]


def test_a_live_display_escapes_what_silos_wrote() -> None:
    from rich.console import Console

    terminal = Console(force_terminal=True, width=200, file=io.StringIO())
    detail = JobDetail(
        job=Job(name=HOSTILE, rounds=5), clients=[ClientActivity(client=HOSTILE, state=HOSTILE, note=HOSTILE)]
    )
    terminal.print(progress_panel(detail))
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert r"[/b][red]\x1b]52" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown


def test_code_and_file_names_are_quoted_for_those_who_paste_them() -> None:
    lines = loading_lines(
        JobTaskTable(
            name='x"); import os; os.system("id")  #', **{"mode": '"); import os  #', "n": [True, None]}
        ),
        Path('a"b.safetensors'),
    )
    tree = ast.parse("\n".join(lines))
    assert [type(line).__name__ for line in tree.body] == ["Import", "Assign", "Expr"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("digits", "digits.safetensors"),
        ("digits.py:Digits", "digits.py-Digits.safetensors"),
        ("tasks/digits.py:Digits", "tasks-digits.py-Digits.safetensors"),
        ('a<b>c"d|e?f*g\\h', "a-b-c-d-e-f-g-h.safetensors"),
    ],
)
def test_a_model_gets_a_name_that_every_file_system_takes(name: str, file: str) -> None:
    assert _file_named(name) == Path(file)


@pytest.mark.parametrize("name", ["../digits", ".profile", "a\nb", "x" * 101, "nul", "Con.py:Task"])
def test_a_name_that_is_no_files_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="say where, with -o FILE"):
        _file_named(name)


def test_the_newest_evaluated_model_is_shown_at_each_silo(capsys: pytest.CaptureFixture[str]) -> None:
    def record(number: int, told: dict[str, dict[str, list[float]]]) -> str:
        empty = {"training": {}, "evaluation": {}, "before": {}, "charge": {}, "withheld": ["cohort"]}
        return json.dumps({"round": number, "client_metrics": told, "started": 0.0, "ended": 1.0, **empty})

    config = parse_job(
        'task = "t"\nrounds = 3\n[metrics]\nerror = "10 - accuracy"\n[stop]\nmetric = "error"\n'
    )
    told = {"alder": {"accuracy": [9.0, 10]}, "birch": {"accuracy": [1.0, 4]}, "cedar": {"loss": [1.0, 2]}}
    detail = JobDetail(
        job=Job(id="abc", name="digits", status="running", rounds=3),
        history=[record(1, {"alder": {"accuracy": [0.0, 1]}}), record(2, told), record(3, {})],
        job_config=config.to_json(),
    )
    print_detail(detail)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["model", "2", "at", "accuracy", "error", "loss"])
    assert lines[at + 1 : at + 7] == [
        ["alder", "0.9", "1"],
        ["birch", "0.25", "9"],
        ["cedar", "0.5"],
        ["mean", "0.575", "5"],
        ["spread", "0.325", "4"],
        ["worst", "tenth", "0.25", "9"],
    ]
    table = measured_by_silo([json.loads(one) for one in detail.history], detail.job_config)
    assert table is not None
    assert list(table)[1] == {"round": 2, "client": "birch", "accuracy": 0.25, "error": 9.0}
    assert table.plain_fairness["error"]["worst_tenth"] == 9.0
    assert measured_by_silo([json.loads(record(1, {}))], detail.job_config) is None


def test_what_is_not_known_of_a_job_is_null_to_programs() -> None:
    # A best model of round 0 would be the one that the job began with, an epsilon of 0 perfect privacy.
    told = as_dict(JobDetail(job=Job(id="a", status="running"), clients=[ClientActivity(client="alder")]))
    assert (told["job"]["id"], told["job"]["rounds_done"], told["job"]["reason"]) == ("a", 0, "")
    assert told["job"]["best"] is told["job"]["model"] is told["clients"][0]["figures"] is None
    kept = as_dict(Job(best={"round": 3, "value": 0.0}))
    assert (kept["best"]["round"], kept["best"]["value"]) == (3, 0.0)
    promise = as_dict(JobPrivacy(job="a"))
    assert promise["epsilon"] is promise["budget"] is None
    assert as_dict(JobPrivacy(epsilon=0.0))["epsilon"] == 0.0


def test_a_question_that_nobody_can_answer_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(click.UsageError, match="--yes"):
        confirm("Delete it?")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    with pytest.raises(click.Abort):
        confirm("Delete it?")
