"""Jobs drawn at random, in which somebody is killed at a drawn place of a drawn round: what was undisturbed.

    ROUNDTABLE_TEST_JOBS=500 pytest -m slow tests/durability/test_any_job_killed.py

draws so many.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import unvarying
from any_job import LINES, NAMED, SILOS, TASK, Document, Run, job_of, simulated
from any_job_silos import forget_accounts, write_files
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import PATIENCE, Federation
from pydantic import ValidationError

from roundtable.asked_silos import standardised_by_silos
from roundtable.core import JobConfig, open_model, save_model
from roundtable.core.errors import RoundtableError, UnavailableError
from roundtable.core.failpoints import AGENT_POINTS, COORDINATOR_POINTS
from roundtable.operator import OperatorClient
from roundtable.preparation import prepare_job

JOBS = int(os.environ.get("ROUNDTABLE_TEST_JOBS", "20"))
NAMES = tuple(f"client-{place}" for place in range(SILOS))
ANYWHERE = ("job_stored", "retired")
PATIENT = {"cohort": {"retries": 3, "grace": "10m", "deadline": "2m"}}
PLACES = st.tuples(st.just("hub"), st.sampled_from(sorted(COORDINATOR_POINTS))) | st.tuples(
    st.sampled_from(NAMES), st.sampled_from(sorted(AGENT_POINTS))
)


class World(Federation):
    """Processes, in which each drawn job is disturbed once."""

    def begin(self) -> None:
        write_files(self.folder)
        self.coordinator()
        for name in NAMES:
            self.agent(name)
        self.until(self.all_there)

    def all_there(self) -> bool:
        with suppress(UnavailableError), self.operator() as operator:
            return sum(client.online for client in operator.clients()) == SILOS
        return False

    def start_again(self, name: str, fault: str = "") -> None:
        """Kills it where it still runs, and starts it: to be killed at a place, or not."""
        if name in self.processes:
            self.kill(name)
        if name == "hub":
            self.coordinator(fault)
        else:
            self.agent(name, fault)

    def through(self, job: JobConfig, name: str, place: str) -> tuple[Run | str, bool]:
        """How the job goes where this process is killed at this place; whether it came there."""
        forget_accounts(self.folder)
        self.start_again(name, place)
        over = Event()
        with ThreadPoolExecutor(1) as threads:
            revived = threads.submit(self._revive, name, over)
            try:
                self.until(self.all_there)
                found = self._run(job)
            finally:
                over.set()
            died = revived.result()
        return found, died

    def _revive(self, name: str, over: Event) -> bool:
        """Starts it again once it has died; False where the job was over before."""
        while self.processes[name].poll() is None:
            if over.wait(0.05):
                return False
        self.start_again(name)
        return True

    def _asked(self, ask: Callable[[OperatorClient], Any]) -> Any:
        """What the operator is told, by a coordinator that may be killed meanwhile."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with self.operator() as operator:
                    return ask(operator)
            except UnavailableError:
                if time.monotonic() > end:
                    raise

    def _run(self, job: JobConfig) -> Run | str:
        first, last = self.folder / "initial.safetensors", self.folder / "final.safetensors"
        try:
            job = self._asked(lambda operator: standardised_by_silos(operator, job))
            save_model(first, prepare_job(job, self.folder).model)
            identifier = self.submit(job, job.title)

            def followed(operator: OperatorClient) -> Any:
                for update in operator.watch(identifier, patience=PATIENCE):
                    if update.detail.job.status == "paused":
                        break
                detail = operator.job(identifier)
                given = detail.job.best.model if detail.job.HasField("best") else detail.job.model
                operator.get_artifact(given.digest, given.size, last)
                return detail

            detail = self._asked(followed)
        except RoundtableError as error:
            return str(error)
        records = [json.loads(record) for record in detail.history]
        return Run(detail.job.status, detail.job.reason, records, open_model(last).vector)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, NAMES, program="any_job_process", hub_program="any_job_process", task=TASK)
    try:
        world.begin()
        yield world
    finally:
        world.close()


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * JOBS)
def test_any_job_ends_as_undisturbed_whoever_is_killed(world: World) -> None:
    """Where a round was tried again its cohort may be another, and then the job just ends as it would."""
    outcomes, numbers = Counter[str](), count()

    @settings(max_examples=JOBS)
    @given(NAMED, LINES, PLACES, st.integers(1, 3))
    def search(name: str, lines: tuple[Document, ...], place: tuple[str, str], round: int) -> None:
        number = next(numbers)
        try:
            job = job_of(name, lines, number, world.folder, PATIENT)
        except ValidationError:
            outcomes["no job"] += 1
            return
        (world.folder / f"toy{number}.py").write_text(TASK)
        (world.folder / "seed.txt").write_text(str(job.seed))
        who, point = place
        fault = f"*/*/{point}" if point in ANYWHERE else f"{round}/*/{point}"
        expected = simulated(job, world.folder)
        if isinstance(expected, str):
            outcomes["refused"] += 1
            return
        found, died = world.through(job, who, fault)
        outcomes["killed" if died else "not reached"] += 1
        if isinstance(found, str):
            assert "[root_data" in found
            return
        first = next(expected.differences(found, job, again=True), "")
        assert not first, f"{who} killed at {fault}: {first}"

    with unvarying.unvaried("noise", simulated=True):
        search()
    assert outcomes["killed"] > JOBS / 8, outcomes
