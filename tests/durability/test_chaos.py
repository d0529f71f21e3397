"""A short form of `benchmarks/chaos.py`: faults of all sorts at random; nothing is lost, doubled or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Chaos


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_whatever_fails(tmp_path: Path) -> None:
    report = Chaos(tmp_path, silos=3, seed=7).run(faults=12, most_seconds=120.0)
    assert sum(report.faults.values()) > 4, report
    assert report.rounds > 5
    assert report.acknowledged > 10
    assert (report.lost, report.doubled, report.wrong_models) == ([], [], [])
