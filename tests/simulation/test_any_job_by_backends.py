"""Jobs drawn at random by each backend of a simulation: the same rounds, or the same refusal.

    ROUNDTABLE_TEST_JOBS=5000 pytest -m slow tests/simulation/test_any_job_by_backends.py

draws so many.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import unvarying
from any_job import LINES, NAMED, TASK, Document, job_of, simulated
from any_job_silos import write_files
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

JOBS = int(os.environ.get("ROUNDTABLE_TEST_JOBS", "300"))
OTHERS = {"processes": 2e-5, "vectorised": 5e-4, "stacked": 5e-4}
"""How far another backend's figures may be from those of one client after the other."""


@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * JOBS)
def test_any_job_goes_the_same_way_by_each_backend(tmp_path: Path) -> None:
    outcomes, numbers = Counter[str](), count()
    (tmp_path / "toy.py").write_text(TASK)
    write_files(tmp_path)

    @settings(max_examples=JOBS)
    @given(NAMED, LINES, st.sampled_from(sorted(OTHERS)))
    def search(name: str, lines: tuple[Document, ...], other: str) -> None:
        try:
            job = job_of(name, lines, next(numbers), tmp_path)
        except ValidationError:
            outcomes["no job"] += 1
            return
        if other == "stacked" and job.task.parameters.get("drop"):
            # The same in distribution only.
            outcomes["drawn otherwise"] += 1
            return
        job = job.model_copy(update={"task": job.task.model_copy(update={"name": "toy.py:Toy"})})
        again = {"backend": other, "workers": 2 if other == "processes" else 1}
        one, another = (
            simulated(job.model_copy(update={"simulation": job.simulation.model_copy(update=each)}), tmp_path)
            for each in ({}, again)
        )
        if isinstance(one, str) or isinstance(another, str):
            outcomes["refused"] += 1
            assert one == another
        else:
            outcomes["run"] += 1
            # Updates that are added up where they are have no rows to be compared with each other.
            found = (each for each in one.differences(another, job, OTHERS[other]) if "diagnosis" not in each)
            first = next(found, "")
            assert not first, f"{other}: {first}"

    with unvarying.unvaried("noise", simulated=True):
        search()
    assert outcomes["run"] > JOBS / 4, outcomes
