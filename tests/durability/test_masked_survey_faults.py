"""Masked surveys with noise: a silo or the coordinator is killed (SIGKILL) in a round and started again.

Whatever is lost and asked again, each silo masks the noisy sums that it has released before and pays once
for each round in its own ledger. The coordinator's, which cannot see that they are the same under other
masks, has one charge for each attempt that arrived. No total is opened of fewer silos than the survey asks.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from noisy_silos import SURVEY, write
from processes import PATIENCE, Federation

from roundtable.asked_silos import begin
from roundtable.core.config import JobConfig
from roundtable.privacy.example_level import SiloAccount
from roundtable.surveys import load_survey, survey_job

SILOS = ("alder", "birch", "cedar")
VICTIM = SILOS[0]
# Two rounds: describe, and trees of one round behind the first.
ASKED = "secure_aggregation = true\n" + SURVEY.replace("rounds = 2", "rounds = 1")
AGENT = (
    "2/train/accepted",
    "2/train/model_here",
    "2/train/masked",
    "2/train/keys_kept",
    "2/train/update_described",
    "2/train/upload_part",
    "2/train/receipt_here",
    "before:PEERS",
    "after:PEERS",
    "after:INBOX",
    "before:ALIVE",
    "after:ALIVE",
    "before:EVIDENCE",
    "after:EVIDENCE",
)
# With noise no transition leads to the phase select: authorised, a round goes on to train.
COORDINATOR = (
    "1/authorize/transition_due",
    "1/commit/transition_stored",
    "2/train/transition_stored",
    "2/train/receipt_due",
    "2/aggregate/aggregated",
    "2/commit/transition_stored",
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("surveys"), SILOS)
    write(made.folder, ASKED)
    made.coordinator()
    for name in SILOS:
        agent(made, name)
    made.until(lambda: known(made) == len(SILOS))
    yield made
    made.close()


def known(federation: Federation) -> int:
    """Silos that have said to the coordinator that they answer analyses."""
    with federation.operator() as operator:
        return sum("analysis" in client.tasks for client in operator.clients())


def agent(federation: Federation, name: str, fault: str = "", **more: Any) -> None:
    data = {"people": {"file": str(federation.folder / f"{name}.csv")}}
    federation.agent(name, fault, tasks={"analysis": "analysis"}, data=data, **more)


def asked(federation: Federation) -> JobConfig:
    survey = load_survey(federation.folder / "survey.toml").model_copy(update={"silos": {}})
    job = survey_job(survey, len(SILOS))
    cohort = job.cohort.model_copy(update={"grace": 600.0, "retries": 3})
    return job.model_copy(update={"cohort": cohort})


def submitted(federation: Federation, job: JobConfig, request: str) -> str:
    with federation.operator() as operator:
        return str(begin(operator, job, request, federation.folder).id)


def state(federation: Federation, name: str) -> Path:
    return federation.folder / "silos" / name


def released(federation: Federation) -> dict[Path, bytes]:
    """What the victim has released of all jobs, by file: noisy sums, before masks."""
    files = state(federation, VICTIM).glob("jobs/*/released-*.safetensors")
    return {file: safetensors.torch.load_file(file)["sums"].numpy().tobytes() for file in files}


def dies(federation: Federation, name: str) -> None:
    """By the fault that was armed; who does not is left to the next test to kill."""
    assert federation.processes[name].wait(PATIENCE) == -signal.SIGKILL
    del federation.processes[name]


def check(federation: Federation, job: JobConfig, name: str, before: dict[Path, bytes]) -> None:
    detail = federation.finish(name)
    assert detail.job.status == "finished", detail.job.reason
    records = [json.loads(record) for record in detail.history]
    assert [record["round"] for record in records] == [1, 2]
    assert all(record["contributors"] == sorted(SILOS) for record in records)
    assert {*before.items()} <= {*released(federation).items()}, "who is asked again sends the same noise"
    for silo in SILOS:
        account = SiloAccount.from_json((state(federation, silo) / "privacy" / "example.json").read_text())
        assert Counter(entry.round for entry in account.entries if entry.job == name) == {1: 1, 2: 1}
    with federation.operator() as operator:
        charges = [each for each in operator.privacy_charges() if each.job == name and each.silo in SILOS]
    counted = Counter((each.silo, each.round, each.attempt) for each in charges)
    assert set(counted.values()) == {1}
    last = {record["round"]: record["attempt"] for record in records}
    assert {(silo, round, last[round]) for silo in SILOS for round in (1, 2)} <= set(counted)
    assert all(attempt <= last[round] for _, round, attempt in counted)


@pytest.mark.parametrize("place", AGENT)
def test_a_silo_is_killed(federation: Federation, place: str) -> None:
    if "hub" not in federation.processes:
        federation.coordinator()
    if VICTIM in federation.processes:
        federation.kill(VICTIM)
    around = {"fault_at": place} if ":" in place else {}
    agent(federation, VICTIM, "" if around else place, **around)
    job = asked(federation)
    name = submitted(federation, job, place)
    dies(federation, VICTIM)
    before = released(federation)
    agent(federation, VICTIM)
    check(federation, job, name, before)


@pytest.mark.parametrize("place", COORDINATOR)
def test_the_coordinator_is_killed(federation: Federation, place: str) -> None:
    if "hub" in federation.processes:
        federation.kill("hub")
    federation.coordinator(place)
    job = asked(federation)
    name = submitted(federation, job, place)
    dies(federation, "hub")
    before = released(federation)
    federation.coordinator()
    check(federation, job, name, before)
