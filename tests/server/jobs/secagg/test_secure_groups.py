"""Groups with a robust rule over them, in the service: a real coordinator and real agents over TLS."""

from __future__ import annotations

import json
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from secure_federation import QUIET, Federation, GivenTrainer

from roundtable.client.agent import secure_attempts as client_secure
from roundtable.core.models import open_model
from roundtable.privacy.secagg import ArraySource

COLUMNS = 400
NINE = tuple(f"silo-{number}" for number in range(9))
GROUPED = (
    QUIET
    + """
[aggregation]
rule = "minimum_diameter_averaging"
parameters = { f = 1 }
[privacy]
level = "none"
secure_aggregation = true
clip_norm = 2.0
group_size = 3
"""
)
HONEST = torch.ones(COLUMNS) / COLUMNS**0.5


def trainers(federation: Federation, **deltas: torch.Tensor) -> dict[str, GivenTrainer]:
    """Silos that agree with each other, but for a little of their own, and those that are given otherwise."""
    made = {}
    for place, name in enumerate(federation.names):
        generator = torch.Generator().manual_seed(place)
        own = HONEST + 1e-3 * torch.randn(COLUMNS, generator=generator) / COLUMNS**0.5
        delta = deltas.get(name.replace("-", "_"), own)
        made[name] = GivenTrainer(lambda round, delta=delta: delta)
        made[name].gate.set()
    return made


async def result_of(federation: Federation, operator: Any, job: str) -> tuple[torch.Tensor, dict[str, Any]]:
    detail = await operator.job(job)
    path = federation.folder / "result.safetensors"
    path.write_bytes(await operator.fetch(detail.job.model.digest))
    return open_model(path).vector.clone(), json.loads(detail.history[-1])


async def submit(operator: Any, text: str = GROUPED, cohort: str = "[cohort]\nsize = 9\n") -> str:
    job = await operator.submit(cohort + text, rounds=1, vector=torch.zeros(COLUMNS))
    return str(job.id)


async def updates_received(operator: Any, job: str, count: int) -> None:
    events: set[int] = set()
    while len(events) < count:
        event = await operator.watch_for(job, "update_received")
        events.add(event.sequence)
        detail = await operator.job(job)
        if int(detail.waiting_for.split(" of ")[0]) >= count:
            return


async def test_a_poisoned_silo_spoils_its_group_alone(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *NINE)
    given = trainers(federation, silo_4=-50.0 * HONEST)
    async with federation.coordinator(), federation.agents(given), federation.operator() as operator:
        job = await submit(operator)
        await operator.watch_until(job, "finished")
        vector, record = await result_of(federation, operator, job)
    groups = record["charge"]["groups"]
    assert sorted(name for group in groups for name in group["members"]) == list(NINE)
    assert [group["silos"] for group in groups] == [3, 3, 3]
    # The rule gives weight to the two groups without the poisoned silo, and none to its own.
    assert [group["share"] == 0 for group in groups] == ["silo-4" in group["members"] for group in groups]
    assert (vector - HONEST).norm() < 2e-3
    assert record["charge"]["clipped"] == 1
    assert "groups of 3 silos" in record["charge"]["protocol"]
    assert record["contributors"] == list(NINE)
    assert record["training"] == {"loss": [pytest.approx(45.0, abs=1e-3), 90]}
    assert not list((tmp_path / "artifacts" / "secure").iterdir())


async def test_a_silo_that_submits_noise_costs_its_group_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It masks whatever it likes: the group's sum is no sum of honest silos, and is left out by name."""
    federation = Federation.make(tmp_path, *NINE)
    honest = client_secure.MaskingAttempt.mask

    def mask(attempt: Any, *given: Any) -> Any:
        if attempt.client.name == "silo-7":
            length = attempt.client.session.length
            noise = ArraySource(np.random.default_rng(1).integers(0, 1 << 32, length, dtype=np.uint32))
            attempt._round = type("Malicious", (), {"encode": lambda *_: noise})()
        return honest(attempt, *given)

    monkeypatch.setattr(client_secure.MaskingAttempt, "mask", mask)
    async with (
        federation.coordinator(),
        federation.agents(trainers(federation)),
        federation.operator() as operator,
    ):
        job = await submit(operator)
        events = await operator.watch_until(job, "finished")
        vector, record = await result_of(federation, operator, job)
    out = {event.client for event in events if event.kind == "update_excluded"}
    (group,) = [g["members"] for g in record["charge"]["groups"] if "silo-7" in g["members"]]
    assert out == set(group)
    assert "which no honest silos can" in record["excluded"]["silo-7"]
    assert (vector - HONEST).norm() < 2e-3


async def test_a_group_below_its_threshold_is_left_out_and_the_round_goes_on(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *NINE, "silo-9a", "silo-9b", "silo-9c")
    given = trainers(federation)
    given["silo-2"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in given.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, cohort='[cohort]\nsize = 12\ngrace = "0.2s"\n')
        await updates_received(operator, job, 11)
        await federation.kill(running["silo-2"])
        await operator.watch_until(job, "finished")
        vector, record = await result_of(federation, operator, job)
    assert record["attempt"] == 1
    assert len(record["charge"]["groups"]) == 3
    assert len(record["excluded"]) == 2
    for reason in record["excluded"].values():
        assert "its group was lost: 2 of 3 silos submitted its vector; 3 are needed" in reason
    assert len(record["contributors"]) == 9
    assert record["charge"] | {"silos": 9, "cohort": 11} == record["charge"]
    assert (vector - HONEST).norm() < 2e-3


async def test_too_few_groups_fail_the_attempt_and_the_next_has_fresh_keys(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *NINE)
    given = trainers(federation)
    given["silo-2"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in given.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        cohort = '[cohort]\nsize = 9\nretries = 9\ngrace = "0.2s"\ndeadline = "9s"\n'
        job = await submit(operator, cohort=cohort)
        await updates_received(operator, job, 8)
        await federation.kill(running["silo-2"])
        failed = await operator.watch_for(job, "attempt_failed")
        assert "8 of at least 9 updates" in failed.message
        given["silo-2"].gate.set()
        await stack.enter_async_context(federation.agent("silo-2", given["silo-2"]))
        await operator.watch_until(job, "finished")
        _, record = await result_of(federation, operator, job)
    assert record["attempt"] > 1


async def test_a_restarted_coordinator_goes_on_with_the_same_groups(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *NINE)
    given = trainers(federation)
    given["silo-2"].gate.clear()
    async with AsyncExitStack() as stack:
        async with federation.coordinator():
            for name, trainer in given.items():
                await stack.enter_async_context(federation.agent(name, trainer))
            async with federation.operator() as operator:
                job = await submit(operator)
                await updates_received(operator, job, 8)
        async with federation.coordinator(), federation.operator() as operator:
            given["silo-2"].gate.set()
            await operator.watch_until(job, "finished")
            vector, record = await result_of(federation, operator, job)
    assert record["attempt"] == 1
    assert all(len(trainer.steps) == 1 for trainer in given.values())
    assert (vector - HONEST).norm() < 2e-3


async def test_each_group_has_noise_of_its_own_and_a_round_is_charged_once(tmp_path: Path) -> None:
    text = GROUPED.replace('rule = "minimum_diameter_averaging"\nparameters = { f = 1 }',
                           'rule = "median"\nweighting = "uniform"')  # fmt: skip
    text = (
        text.replace('level = "none"\nsecure_aggregation = true', 'level = "distributed"')
        + "noise_multiplier = 0.5\ndelta = 1e-3\n"
    )
    federation = Federation.make(tmp_path, *NINE)
    async with (
        federation.coordinator(),
        federation.agents(trainers(federation)),
        federation.operator() as operator,
    ):
        job = await submit(operator, text)
        await operator.watch_until(job, "finished")
        vector, record = await result_of(federation, operator, job)
    assert record["training"] == {}
    assert len(record["charge"]["groups"]) == 3
    # A group's mean: three shares of variance (0.5 · 2)² / 2, divided by three; the median of three such
    # has 0.67 of the standard deviation of one.
    expected = 0.67 * (3 / 2) ** 0.5 / 3
    assert (vector - HONEST).std().item() == pytest.approx(expected, rel=0.15)
    with sqlite3.connect(tmp_path / "coordinator.db") as database:
        assert database.execute("SELECT count(*), min(released) FROM ledger").fetchone() == (1, 1)
