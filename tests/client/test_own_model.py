"""Which job is meant of those that have left a model at a silo."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundtable.cli.main import run
from roundtable.client.worker.own_model import identifier_of, remember
from roundtable.client.worker.worker_order import Order
from roundtable.core import parse_job
from roundtable.core.errors import ConfigError


def left(jobs: Path, job: str, name: str, number: int) -> None:
    config = parse_job(f'task = "toy"\nname = "{name}"').to_json()
    remember(jobs, "alder", Order(job, number, "train", config, "toy", "none", "", ""))


def test_a_job_is_meant_by_its_name_where_one_alone_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = tmp_path / "state" / "jobs"
    left(jobs, "J-1", "heart", 2)
    left(jobs, "J-2", "lung", 3)
    (jobs / "J-3").mkdir()
    (jobs / "J-3" / "order.json").write_text("{}")
    assert [identifier_of(jobs, wanted) for wanted in ("J-1", "heart", "lung", "skin", "../J-1")] == [
        "J-1",
        "J-1",
        "J-2",
        "skin",
        "../J-1",
    ]
    left(jobs, "J-4", "lung", 7)
    left(jobs, "heart", "other", 1)
    assert identifier_of(jobs, "heart") == "heart", "an identifier comes first"
    with pytest.raises(
        ConfigError, match=r"called 'lung': J-2 \(round 3\), J-4 \(round 7\); name one by its"
    ):
        identifier_of(jobs, "lung")
    agent = tmp_path / "agent.toml"
    agent.write_text(
        'coordinator = "localhost:9"\ncredentials = "alder"\nstate = "state"\n[tasks]\ntoy = "toy.py"\n'
    )
    assert run(["client", "--config", str(agent), "model", "lung"]) == 2
    assert "J-2 (round 3), J-4 (round 7)" in capsys.readouterr().err
