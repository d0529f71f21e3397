"""Killed anywhere between encoding and commit, a silo remembers each counted update once, and no other.

The gradient is a constant D, whatever the model: what each way of remembering sends and keeps of n times D is
known, and a run with a kill ends with the very bits of one without.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PATIENCE, SILOS, Federation
from torch import Tensor
from training_processes import workers

from roundtable.core import open_model

VICTIM, OTHER = SILOS[0], SILOS[1]
SIZE, KEPT, RATE, MOMENTUM, ROUNDS = 2000, 100, 0.5, 0.9, 3
TASK = """
import torch
from roundtable.core import Task

class Halves(torch.nn.ModuleList):
    def __init__(self):
        super().__init__([torch.nn.Linear(40, 25, bias=False), torch.nn.Linear(40, 25, bias=False)])
    @property
    def weight(self):
        return torch.cat([half.weight for half in self])

class Toy(Task):
    def model(self):
        return Halves()
    def data(self, site):
        return (torch.randn(1, 50, 40, generator=torch.Generator().manual_seed(len(site.name))),), None
    def loss(self, model, batch):
        return (model.weight * batch[0]).sum()
"""
TOPK = f"topk(ratio={KEPT / SIZE})"
_FOUR_BITS = {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"}
WAYS: dict[str, dict[str, Any]] = {
    "error": {"up": TOPK},
    "momentum": {"up": TOPK, "momentum": MOMENTUM},
    "ef21": {"up": TOPK, "feedback": "ef21"},
    "lowrank": {"up": "lowrank(rank=2)"},
    **dict.fromkeys(("streaming", "overlap", "eager"), _FOUR_BITS),
}
_GOES_ON = {"optimizer_state": "keep", "momentum": 0.5}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "streaming": {"name": "streaming", "fragments": 2, "mixing": 0.5, **_GOES_ON},
    "overlap": {"name": "streaming", "fragments": 2, "mixing": 0.5, "overlap": True, **_GOES_ON},
    "eager": {"name": "eager", **_GOES_ON},
}
AGENT = ("update_encoded", "memory_kept", "update_written", "update_described", "upload_part", "receipt_here")
HUB = (
    "2/train/receipt_due",
    "2/aggregate/aggregated",
    "2/commit/transition_open",
    "2/commit/transition_stored",
)
TRAINING = ("update_encoded", "memory_kept")
FAST = {("error", "memory_kept")}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("federation"), task=TASK)
    made.coordinator()
    for name in SILOS:
        made.agent(name)
    yield made
    made.close()


Ended = list[str]
"""The digests of all rounds' models: what a round leaves at a silo is in the next one's."""


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> Callable[[str], Ended]:
    """The end of a job of each way where nothing happens."""
    found: dict[str, Ended] = {}

    def of(way: str) -> Ended:
        if way not in found:
            everybody(federation)
            found[way], _ = ended(federation, submit(federation, way, f"undisturbed {way}"))
        return found[way]

    return of


def everybody(federation: Federation) -> None:
    """All are there, and none has a fault that is still armed."""
    for name in ("hub", *SILOS):
        if name not in federation.processes:
            federation.coordinator() if name == "hub" else federation.agent(name)


def submit(federation: Federation, way: str, request: str, deadline: str = "10m") -> str:
    job = federation.job(
        rounds=ROUNDS,
        cohort={"size": 3, "minimum": 3, "grace": "10m", "deadline": deadline},
        aggregation={"weighting": "uniform", "validation": {"norm_ratio": "off"}},
        algorithm={"learning_rate": RATE, "batch_size": 1, "steps": 1, **ALGORITHMS.get(way, {})},
        evaluation={"every": 0},
        transfer=WAYS[way],
    )
    return federation.submit(job, request)


def ended(federation: Federation, job: str) -> tuple[Ended, list[int]]:
    """How a job ended in which every round has every silo; and the attempt of each round."""
    detail = federation.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    records = [json.loads(record) for record in detail.history]
    assert [record["contributors"] for record in records] == [sorted(SILOS)] * ROUNDS
    attempts = [record["attempt"] for record in records]
    return [record["model"] for record in records], attempts


def largest(values: Tensor) -> Tensor:
    kept = torch.zeros_like(values)
    places = values.abs().topk(KEPT).indices
    kept[places] = values[places]
    return kept


def by_hand(way: str, silo: str) -> Tensor:
    """By how much a silo moves the model in all rounds."""
    direction = torch.randn(1, 50, 40, generator=torch.Generator().manual_seed(len(silo))).flatten()
    moved, memory, beside = torch.zeros(SIZE), torch.zeros(SIZE), torch.zeros(SIZE)
    for _ in range(ROUNDS):
        if way == "ef21":
            beside = beside + largest(-RATE * direction - beside)
            moved += beside
            continue
        beside = MOMENTUM * beside - RATE * direction if way == "momentum" else -RATE * direction
        sent = largest(beside + memory)
        moved, memory = moved + sent, beside + memory - sent
        beside = torch.where(sent == 0, beside, torch.zeros(SIZE))
    return moved


@pytest.mark.parametrize("way", [pytest.param("error", marks=pytest.mark.slow), "momentum", "ef21"])
def test_agents_remember_what_the_papers_say(
    federation: Federation, undisturbed: Callable[[str], Ended], way: str
) -> None:
    models = undisturbed(way)
    moved = torch.stack([by_hand(way, silo) for silo in SILOS]).mean(0)
    with federation.operator() as operator:
        (job,) = (each for each in operator.jobs() if each.model.digest == models[-1])
        operator.get_artifact(job.model.digest, job.model.size, federation.folder / way)
    start = open_model(federation.folder / "initial.safetensors").vector
    torch.testing.assert_close(open_model(federation.folder / way).vector - start, moved, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "point"),
    [
        pytest.param(way, point, marks=() if (way, point) in FAST else pytest.mark.slow)
        for way in WAYS
        for point in AGENT
    ],
)
def test_an_agent_is_killed(
    federation: Federation, undisturbed: Callable[[str], Ended], way: str, point: str
) -> None:
    wanted = undisturbed(way)
    federation.kill(VICTIM)
    federation.agent(VICTIM, f"2/train/{point}")
    job = submit(federation, way, f"{way} {point}")
    assert federation.died(VICTIM) == -signal.SIGKILL
    federation.agent(VICTIM)
    assert ended(federation, job)[0] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("point", TRAINING)
@pytest.mark.parametrize("way", WAYS)
def test_a_training_process_is_killed_under_its_agent(
    federation: Federation, undisturbed: Callable[[str], Ended], way: str, point: str
) -> None:
    """The agent lives, and the attempt fails; what the process had kept of it does not count."""
    wanted = undisturbed(way)
    federation.kill(VICTIM)
    agent = federation.installed_agent(VICTIM, f"2/train/{point}:stop")
    job = submit(federation, way, f"{way} {point} alone")
    killed = standing_still(federation, agent.pid)
    os.kill(killed, signal.SIGKILL)
    following = standing_still(federation, agent.pid, killed)
    os.kill(following, signal.SIGCONT)
    found, attempts = ended(federation, job)
    assert attempts[1] > 1
    assert agent.poll() is None
    assert found == wanted
    federation.kill(VICTIM)
    federation.agent(VICTIM)


def standing_still(federation: Federation, agent: int, but: int = 0) -> int:
    """The training process of an agent that stands at the armed place; another than `but`."""
    found: list[int] = []

    def stands() -> bool:
        found[:] = [
            each
            for each in workers(agent)
            if each != but and Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        ]
        return bool(found)

    federation.until(stands)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ef21", "streaming", "overlap"])
@pytest.mark.parametrize("place", HUB)
def test_the_coordinator_is_killed(
    federation: Federation, undisturbed: Callable[[str], Ended], way: str, place: str
) -> None:
    wanted = undisturbed(way)
    federation.kill("hub")
    federation.coordinator(place)
    job = submit(federation, way, f"{way} {place}")
    assert federation.died("hub") == -signal.SIGKILL
    federation.coordinator()
    assert ended(federation, job)[0] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_update_of_an_attempt_that_fails_leaves_no_trace(
    federation: Federation, undisturbed: Callable[[str], Ended], way: str
) -> None:
    """Another silo is lost in round 2: the victim's update is there, and in no model."""
    wanted = undisturbed(way)
    federation.kill(OTHER)
    federation.agent(OTHER, "2/train/model_here")
    job = submit(federation, way, f"{way} fails", deadline="4s")
    assert federation.died(OTHER) == -signal.SIGKILL
    with federation.operator() as operator:
        for update in operator.watch(job, patience=PATIENCE):
            if any(event.kind == "attempt_failed" for event in update.events):
                break
    federation.agent(OTHER)
    found, attempts = ended(federation, job)
    assert attempts[1] > 1
    assert found == wanted
