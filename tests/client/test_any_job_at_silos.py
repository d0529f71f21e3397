"""Jobs drawn at random, at a coordinator with agents and in a simulation: the same rounds, or two refusals.

    ROUNDTABLE_TEST_JOBS=5000 pytest -m slow tests/client/test_any_job_at_silos.py

draws so many. A job that differs is made smaller by Hypothesis and printed as a job file, with the first
figure that differs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import algorithm_table as table
import pytest
import unvarying
from federation import NAMES, Federation, agents, federation_of, run_job, silo
from hypothesis import given, note, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from roundtable.cli.shared.resolved import toml_value
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable, TaskTable
from roundtable.core import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.identity.credentials import issue
from roundtable.core.privacy_table import hides_figures, masking_of
from roundtable.engine import record_to_plain
from roundtable.operator import OperatorClient
from roundtable.preparation import prepare_job
from roundtable.server.jobs.admission import new_job
from roundtable.simulation import simulate

JOBS = int(os.environ.get("ROUNDTABLE_TEST_JOBS", "100"))
BATCH = 500
NAMES_OF_TASKS = 1000
"""As many as a coordinator takes of a silo's: one for each job of a batch, and while one is made smaller."""
SILOS = 5
TASK = f"""
import sys
KIT = {str(Path(unvarying.__file__).parent)!r}
if KIT not in sys.path:
    sys.path.append(KIT)
from any_job_task import Toy
from unvarying import unvary
unvary("noise")
"""
"""A silo's file: the noise of its training process, too, is that of the simulation."""
Document = dict[str, Any]
AXES: dict[str, list[Document]] = tomllib.loads(Path(__file__).with_name("any_job.toml").read_text())
KNOWN = {
    "a simulation has virtual time": "started ended trials "
    "up_seconds down_seconds encoding_seconds decoding_seconds",
    "a simulation stores no model of a round": "model optimizer",
    "a simulation's noise and masks are seeded or pretended": "guarantee secure_aggregation protocol",
    "a coordinator's ledger is in its database, a simulation's in its records": "charged_attempts paid",
    "a simulation hides nothing from its owner": "withheld",
    "a silo may have the model already, a simulated client is sent each": "down down_plain",
    "a simulation does not measure it of arrays that are only rounded": "error",
}
"""Why fields of a round's record are not compared."""
SKIPPED = {name for names in KNOWN.values() for name in names.split()}


def job_of(name: str, lines: Sequence[Document], number: int) -> JobConfig:
    """The job of this algorithm that says so; its number gives it a seed and a privacy account of its own."""
    document = table.document_of(name)
    document |= {"name": f"any-{number}", "seed": number + 1, "rounds": 3, "evaluation": {}}
    document["task"] = {"name": f"toy{number}.py:Toy", "normalised": name == "fedbn"}
    document["simulation"] = {"clients": SILOS, "backend": "sequential"}
    document["algorithm"] |= {"batch_size": 8, "learning_rate": 0.05}
    for line in lines:
        for key, values in line.items():
            document[key] = {**document.get(key, {}), **values}
    privacy, evaluation = document.get("privacy", {}), document["evaluation"]
    if "level" in privacy:
        document["privacy"] = {"clip_norm": 1.0, "delta": 1e-3, **privacy}
    if "level" in privacy or document.get("transfer", {}).get("feedback") == "ef21":
        document["aggregation"]["weighting"] = "uniform"
    if privacy and "bounds" not in evaluation and "public_evaluation" not in privacy:
        evaluation["every"] = 0
    if "round" not in document:
        document.setdefault("cohort", {"size": SILOS, "minimum": SILOS})
    document["cohort"] = {"retries": 0, "deadline": 60, **document.get("cohort", {})}
    note("\n".join(["", *(f"{key} = {toml_value(value)}" for key, value in document.items())]))
    return JobConfig.model_validate(document)


@dataclass(frozen=True)
class Run:
    """How a job went: each round's record as JSON has it, and the model at the end."""

    status: str
    reason: str
    records: list[Document]
    model: Tensor

    def differences(self, other: Run, job: JobConfig) -> Iterator[str]:
        """Between a simulation and `other`, at silos."""
        # Masked values are rounded to the ring's integers, at random.
        loose = 5e-3 if masking_of(job.privacy) else 2e-5
        yield from _differences(self.status, other.status, loose, "status")
        if self.status != "paused":
            yield from _differences(self.reason, other.reason, loose, "reason")
        for mine, theirs in zip(self.records, other.records, strict=False):
            gone = {*theirs["withheld"]}
            if hides_figures(job.privacy):
                gone.add("transfers")
            if job.privacy.level == "example":
                # The silos alone keep this account.
                gone.add("charge")
            both = ({key: value for key, value in each.items() if key not in gone} for each in (mine, theirs))
            yield from _differences(*both, loose, f"round {mine['round']}")
        yield from _differences(len(self.records), len(other.records), loose, "rounds")
        yield from _differences(self.model.tolist(), other.model.tolist(), loose, "model")


def _differences(one: Any, other: Any, loose: float, where: str) -> Iterator[str]:
    """Of two values of JSON, the first places first; numbers may differ by `loose`, relative or absolute."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - SKIPPED):
            yield from _differences(one.get(key), other.get(key), loose, f"{where}, {key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(left, right, loose, f"{where}, {place}")
    elif isinstance(one, int | float) and isinstance(other, int | float):
        if not math.isclose(one, other, rel_tol=loose, abs_tol=loose) and not (one != one and other != other):
            yield f"{where}: {one} in the simulation, {other} at silos"
    elif one != other:
        yield f"{where}: {one} in the simulation, {other} at silos"


def simulated(job: JobConfig, folder: Path) -> Run | str:
    """The run, or why it is refused."""
    try:
        found = simulate(job, progress=False, folder=folder)
    except RoundtableError as error:
        return str(error)
    records = json.loads(json.dumps([record_to_plain(record) for record in found.history.records]))
    return Run(found.status, found.reason, records, found.model.vector)


def at_silos(job: JobConfig, federation: Federation) -> Run | str:
    """The same at the coordinator, as `job submit` sends it there."""
    try:
        status, records, model = run_job(federation, job, prepare_job(job, federation[1]).model)
    except RoundtableError as error:
        return str(error)
    with OperatorClient(federation[0], federation[1] / "operator") as operator:
        reason = operator.job(job.title).job.reason
    return Run(status, reason, records, model.vector)


def silo_of(federation: Federation, place: int) -> AgentConfig:
    """A silo that is called as a simulated client is, and offers the task under a name for each job."""
    folder, name = federation[1], f"client-{place}"
    issue(folder / "ca", name, "agent", folder / name)
    offered = TaskTable(use="toy.py:Toy", parameters=["normalised", "drop", "mapped"])
    names = [f"toy{number}" for number in range(NAMES_OF_TASKS)]
    return replace(
        silo(federation, NAMES[0]),
        credentials=folder / name,
        state=folder / "state" / name,
        metadata={"region": "ab"[place % 2]},
        tasks=dict.fromkeys(names, offered.use),
        task_tables=dict.fromkeys(names, offered),
        policy=PolicyTable(public_evaluation=True),
    )


def wait_for_silos(federation: Federation) -> None:
    with OperatorClient(federation[0], federation[1] / "operator") as operator:
        while sum(client.online for client in operator.clients()) < SILOS:
            time.sleep(0.01)


NAMED = st.just("fedavg") | st.sampled_from(sorted(name for name in table.ROWS if "by speed" not in name))
LINES = st.lists(st.sampled_from(sorted(AXES)), max_size=4, unique=True).flatmap(
    lambda axes: st.tuples(*(st.sampled_from(AXES[axis]) for axis in axes))
)


@pytest.mark.slow
@pytest.mark.timeout(300 + 30 * BATCH)
@pytest.mark.parametrize("jobs", [min(BATCH, JOBS - begun) for begun in range(0, JOBS, BATCH)])
async def test_any_job_goes_at_silos_as_in_a_simulation(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`job submit` refuses what a simulation refuses, too."""
    outcomes, numbers = Counter[str](), count()
    rows = [f"client-{place},0,1e9,{'ab'[place % 2]}\n" for place in range(SILOS)]
    (tmp_path / "trace.csv").write_text("client,start,end,metadata.region\n" + "".join(rows))

    @settings(max_examples=jobs)
    @given(NAMED, LINES)
    def search(federation: Federation, name: str, lines: tuple[Document, ...]) -> None:
        number = next(numbers)
        try:
            job = job_of(name, lines, number)
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

    async with federation_of(tmp_path, TASK) as federation:
        with unvarying.unvaried("noise", simulated=True):
            async with agents(*(silo_of(federation, place) for place in range(SILOS))):
                await asyncio.to_thread(wait_for_silos, federation)
                await asyncio.to_thread(search, federation)
    assert outcomes["run"] > jobs / 4, outcomes
