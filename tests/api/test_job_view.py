"""A job as `roundtable job show` prints it."""

from __future__ import annotations

import json
import time

import pytest

from roundtable.cli.jobs.job_view import print_detail
from roundtable.proto.common_pb2 import Event
from roundtable.proto.operator_pb2 import ClientActivity, Job, JobDetail


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
