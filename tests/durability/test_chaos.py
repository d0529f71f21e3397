"""Faults of all sorts at random upon jobs of all sorts: `benchmarks/chaos.py` with a seed, short and long."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Chaos


@pytest.mark.parametrize(
    ("seed", "faults", "minutes"),
    [
        pytest.param(3, 12, 10.0, id="short", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param(7, 1000, 30.0, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_whatever_fails_the_models_are_those_of_the_undisturbed_run(
    seed: int, faults: int, minutes: float, tmp_path: Path
) -> None:
    report = Chaos(tmp_path, silos=4, seed=seed).run(faults, 60 * minutes)
    assert report.well, "\n".join(report.lines())
    assert report.faults.total() >= min(12, faults), "too few were tried"
