"""What a watching terminal shows, and what a log gets instead."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from roundtable.cli.jobs import queue
from roundtable.cli.jobs import watch as watching
from roundtable.cli.jobs.watch import Live, PlainLines, follow
from roundtable.core.errors import UnavailableError
from roundtable.operator import OperatorClient
from roundtable.proto.common_pb2 import Event
from roundtable.proto.operator_pb2 import ClientActivity, Job, JobDetail, JobUpdate, QueuedJob

FIGURES = {
    "training": {"loss": 0.25},
    "evaluation": {"loss": 0.5, "accuracy": 0.75},
    "before": {"accuracy": 0.625},
    "cohort": 3,
    "contributors": 2,
    "seconds": 61.0,
}


def _update(status: str, *events: Event) -> JobUpdate:
    north = ClientActivity(client="north", state="training", done=30, total=60, loss=1.5)
    south = ClientActivity(client="south", state="dropped", note="out of memory", loss=float("nan"))
    job = Job(id="j1", name="digits", status=status, rounds=20, rounds_done=3)
    detail = JobDetail(
        job=job,
        round=4,
        phase="train",
        waiting_for="1 of 2 updates; waiting for north",
        clients=[north, south],
    )
    return JobUpdate(events=events, detail=detail)


STARTED = Event(sequence=1, kind="round_started", round=4, message="round 4: north, south")
FAILED = Event(sequence=2, kind="client_failed", round=4, message="south failed: [out] of memory")
COMMITTED = Event(sequence=3, kind="round_committed", round=4, detail=json.dumps(FIGURES))


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    follow([_update("running", STARTED, FAILED, COMMITTED)], PlainLines())
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "round 4: north, south",
        "south failed: [out] of memory",
        "round  4/20  accuracy 0.7500  loss 0.5000  accuracy before the round 0.6250  training loss 0.2500  "
        "2 of 3 silos  1 min 01 s",
    ]


def test_a_live_terminal_shows_who_does_what_and_who_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, color_system=None, highlight=False)
    monkeypatch.setattr(watching, "console", lambda: terminal)
    follow([_update("running", FAILED, COMMITTED)], Live())
    said = screen.getvalue()
    assert "south failed: [out] of memory" in said
    assert "round  4/20  accuracy 0.7500" in said
    for sign in (
        "digits",
        "round 4/20",
        "north",
        "training",
        "loss 1.5000",
        "south",
        "dropped",
        "waiting for north",
    ):
        assert sign in said


def test_following_stops_at_a_pause_but_tells_all_of_an_end() -> None:
    paused = [_update("paused", Event(kind="job_paused")), _update("paused")]
    seen = follow(iter(paused), PlainLines())
    assert seen is not None
    assert seen.status == "paused"
    rest = iter([_update("finished", FAILED), _update("finished", COMMITTED)])
    follow(rest, PlainLines())
    assert next(rest, None) is None


def test_who_watches_is_told_once_that_the_coordinator_is_away(
    roundtable: Callable[..., object], tmp_path: Path
) -> None:
    roundtable("ca", "init", tmp_path / "ca")
    roundtable("ca", "issue", "ada", "--role", "operator", "--ca", tmp_path / "ca", "--out", tmp_path / "ada")
    told: list[str] = []
    with OperatorClient("127.0.0.1:9", tmp_path / "ada") as operator, pytest.raises(UnavailableError):
        list(operator.watch("digits", patience=0.0, away=told.append))
    (line,) = told
    assert line.startswith("nothing listens at 127.0.0.1:9")
    assert line.endswith("it is waited for, 0 minutes at most")


def test_when_a_turn_comes_is_told_in_days_where_it_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "time", SimpleNamespace(time=lambda: 1000.0))
    far = QueuedJob(place=1, expected=1000.0 + 826 * 3600)
    assert queue._until(far) == "in 34 d 10 h"
    assert queue._until(QueuedJob(place=1)) == ""
