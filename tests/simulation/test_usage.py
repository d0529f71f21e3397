"""What a run takes of the machine, seen while it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from roundtable.simulation.reporting.usage import Meter, Usage

WORKER = "import sys; block = bytearray(1) * (64 << 20); sum(range(3_000_000)); print(1, flush=True); input()"


@pytest.mark.skipif(sys.platform != "linux", reason="other processes are seen in /proc alone")
def test_workers_count_too():
    meter = Meter()
    before = meter.look()
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline()
        during = meter.look()
        worker.communicate(b"\n")
    assert during.memory - before.memory > 48 << 20
    assert during.cores > 0
    assert meter.look().memory < during.memory - (48 << 20)


def test_it_is_said_in_a_few_words():
    assert str(Usage(812 << 20, 1.93)) == "812 MiB, 1.9 cores"
    assert str(Usage(1 << 30, 0.5, 3 << 30)) == "1024 MiB, 0.5 cores, GPU 3.0 GiB"


def test_each_round_says_it_and_how_long_it_still_takes(run):
    heard = []
    run(_progress=heard.append)
    rounds = [event for event in heard if event.kind == "round"]
    assert len(rounds) == 3
    assert all(event.usage.memory > 1 << 20 for event in rounds)
    assert [event.seconds_left >= 0 for event in rounds] == [True] * 3
    assert rounds[-1].seconds_left == 0


def test_a_sum_without_masks_is_labelled_wherever_a_result_is_shown(run):
    secure = {"level": "none", "secure_aggregation": True, "clip_norm": 2.0}
    table = {"privacy": secure, "evaluation__every": 0, "rounds": 1}
    fast = run(simulation__masking="fast", **table)
    real = run(**table)
    assert "no masks were made" in repr(fast)
    assert "the protocol ran" in repr(real)
    assert run(rounds=1).secure_aggregation == ""
