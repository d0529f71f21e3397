"""Faults of all sorts at random upon jobs of all sorts: `benchmarks/chaos.py` with a seed, short and long."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Chaos, Report
from chaos_jobs import CASES


def torment(folder: Path, seed: int, faults: int, minutes: float, jobs: int) -> Report:
    """Runs it; every word of the verdict is in the error if it is not as it must be."""
    report = Chaos(folder, silos=4, seed=seed, jobs=jobs).run(faults, 60 * minutes)
    assert report.well, "\n".join(report.lines())
    return report


@pytest.mark.timeout(900)
def test_whatever_fails_each_sort_of_job_ends_with_its_model(tmp_path: Path) -> None:
    report = torment(tmp_path, seed=3, faults=12, minutes=5.0, jobs=len(CASES))
    assert report.faults.total() == 12
    assert set(report.verdict.jobs) == {f"{case}, finished" for case in CASES}


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_thousand_faults_change_no_model(tmp_path: Path) -> None:
    report = torment(tmp_path, seed=7, faults=1000, minutes=90.0, jobs=3)
    assert report.faults.total() == 1000
