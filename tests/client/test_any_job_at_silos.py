"""Jobs drawn at random, at a coordinator with agents and in a simulation: the same rounds, or two refusals.

    ROUNDTABLE_TEST_JOBS=5000 pytest -m slow tests/client/test_any_job_at_silos.py

draws so many. A job that differs is made smaller by Hypothesis and printed as a job file, with the first
figure that differs.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import unvarying
from any_job import LINES, NAMED, REGION_LINES, TASK, Document, job_of, simulated
from any_job_silos import at_silos, silos_of
from federation import Federation
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roundtable.server.jobs.admission import new_job

JOBS = int(os.environ.get("ROUNDTABLE_TEST_JOBS", "100"))
BATCH = 500


@pytest.mark.slow
@pytest.mark.timeout(300 + 30 * BATCH)
@pytest.mark.parametrize("jobs", [min(BATCH, JOBS - begun) for begun in range(0, JOBS, BATCH)])
@pytest.mark.parametrize("relayed", [False, True], ids=["silos", "relays"])
async def test_any_job_goes_at_silos_as_in_a_simulation(
    jobs: int, relayed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`job submit` refuses what a simulation refuses, too."""
    outcomes, numbers = Counter[str](), count()

    @settings(max_examples=jobs)
    @given(NAMED, LINES, REGION_LINES if relayed else st.just({}))
    def search(federation: Federation, name: str, lines: tuple[Document, ...], regions: Document) -> None:
        number = next(numbers)
        try:
            job = job_of(name, (*lines, regions), number, tmp_path)
        except ValidationError:
            outcomes["no job"] += 1
            return
        # Which silos a round asks is drawn from the job's seed in a simulation, and from a secret at silos.
        monkeypatch.setattr(new_job, "secrets", SimpleNamespace(randbits=lambda bits: job.seed))
        (tmp_path / f"toy{number}.py").write_text(TASK)
        expected, found = simulated(job, tmp_path), at_silos(job, federation)
        if isinstance(expected, str) or isinstance(found, str):
            outcomes["refused"] += 1
            assert type(expected) is type(found), (expected, found)
        else:
            outcomes["run"] += 1
            first = next(expected.differences(found, job), "")
            assert not first, first

    with unvarying.unvaried("noise", simulated=True):
        async with silos_of(tmp_path, relayed=relayed) as federation:
            await asyncio.to_thread(search, federation)
    assert outcomes["run"] > jobs / 4, outcomes
