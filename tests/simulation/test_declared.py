"""Simulated clients declare and have what silos do, and are chosen as a coordinator would choose them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.models import model_digest
from roundtable.engine import Roster, RoundEngine
from roundtable.engine import messages as m
from roundtable.server.jobs.job_driver import client_info
from roundtable.server.store import AgentRow
from roundtable.server.store.rows import Capacity
from roundtable.simulation.driver import Driver
from roundtable.simulation.world.config import DevicesTable
from roundtable.simulation.world.declared import Declared, label_counts
from roundtable.simulation.world.devices import Devices

TRACE = """client,start,end,speed,upload,gpus,selected,completed,metadata.region,metadata.examples
a,0,1e9,50,4000,1,9,1,north,20
b,0,1e9,5,90000,1,9,9,north,60
c,0,1e9,20,50000,0,3,3,south,10
d,0,1e9,90,1000,2,,,south,
e,0,1e9,40,20000,1,5,5,,45
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "diversity": {"cohort__strategy": "diversity", "cohort__label": "region"},
    "histogram": {
        "cohort__strategy": "diversity",
        "cohort__label": "labels",
        "cohort__balance": "histogram",
        "simulation__declare": ["labels"],
    },
    "directions": {"cohort__strategy": "diversity", "cohort__balance": "directions"},
    "power_of_choice": {"cohort__strategy": "power_of_choice", "cohort__candidates": 6},
    "oort": {"cohort__strategy": "oort"},
    "reliability": {"cohort__strategy": "reliability"},
    "data_size": {"cohort__strategy": "data_size"},
    "by_speed": {
        "algorithm": {
            "name": "fednova",
            "work": "by_speed",
            "steps": 6,
            "batch_size": 8,
            "learning_rate": 0.1,
        }
    },
    "resources": {"resources__gpus": 1, "resources__labels": {"region": "north"}, "cohort__minimum": 1},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_facts_choose_the_same_clients_at_a_coordinator(
    name: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every event of a simulation goes to an engine over a coordinator's roster too, of agents with the same
    facts: it asks the same clients for the same."""
    (tmp_path / "fleet.csv").write_text(TRACE)
    seen: list[tuple[m.Event, float, list[m.Action]]] = []
    made: list[Driver] = []
    original = RoundEngine.handle

    def handle(engine: RoundEngine, event: m.Event, now: float) -> list[m.Action]:
        actions = original(engine, event, now)
        seen.append((event, now, list(actions)))
        return actions

    begin = Driver.__init__

    def remember(driver: Driver, *arguments: Any) -> None:
        begin(driver, *arguments)
        made.append(driver)

    with monkeypatch.context() as patched:
        patched.setattr(RoundEngine, "handle", handle)
        patched.setattr(Driver, "__init__", remember)
        overrides = {"rounds": 4, "cohort__size": 3, **STRATEGIES[name]}
        result = run(simulation__devices={"trace": str(tmp_path / "fleet.csv")}, **overrides)
    driver, job = made[0], result.job
    engine = RoundEngine.begin(
        job,
        model_digest(driver.world.initial),
        job.seed,
        Roster(),
        driver.plan.separation,
        driver.plan.strategy,
    )
    for number, client in enumerate(driver.world.names):
        simulated = driver.fleet.info(client)
        row = list(csv.DictReader(TRACE.splitlines()))[number % 5]
        agent = AgentRow(
            client,
            "1",
            (job.task.name,),
            simulated.metadata,
            (),
            0.0,
            0.0,
            selected=int(row["selected"] or 0),
            completed=int(row["completed"] or 0),
            capacity=Capacity(1, int(row["gpus"]), 0, 0),
        )
        info = client_info(job, agent, driver.fleet.devices.link(number))
        assert simulated == info
        engine.handle(m.ClientJoined(info), 0.0)
    told, committed = 0, list[m.RoundRecord]()
    for number, (event, now, actions) in enumerate(seen):
        if number % 9 == 8:
            # Another coordinator takes over, with what is durable.
            kept = json.loads(json.dumps(engine.snapshot()))
            population, strategy = engine.population, driver.plan.strategy
            engine = RoundEngine.restore(job, kept, committed, population, strategy)
        here = engine.handle(event, now)
        asked = [action for action in actions if isinstance(action, m.Instruct)]
        assert [action for action in here if isinstance(action, m.Instruct)] == asked
        told += len(asked)
        if isinstance(event, m.Committed):
            committed.append(result.history.records[len(committed)])
    assert told >= 4
    assert result.status == "finished"
    if name == "resources":
        suited = {"client-0", "client-1", "client-5", "client-6"}
        assert all(suited.issuperset(record.cohort) for record in result.history.records)


def declared(job: JobConfig) -> Declared:
    devices = Devices(DevicesTable(), job.simulation.clients, job.seed)
    return Declared(job, devices, lambda index: (None, None))


def test_what_is_drawn_follows_from_the_seed_with_the_stated_shares(make_job: Callable[..., Any]) -> None:
    job = make_job(
        simulation__clients=20_000,
        simulation__metadata={"region": {"north": 3, "south": 1}, "scanner": ["a", "b"], "kind": "clinic"},
    )
    one, again = declared(job), declared(job)
    told = [one.metadata(index) for index in range(20_000)]
    assert told == [again.metadata(index) for index in range(20_000)]
    north = np.mean([each["region"] == "north" for each in told])
    assert abs(north - 0.75) < 5 * (0.75 * 0.25 / 20_000) ** 0.5
    both = Counter((each["region"], each["scanner"]) for each in told)
    assert abs(both["south", "a"] / 20_000 - 0.125) < 5 * (0.125 * 0.875 / 20_000) ** 0.5
    assert {each["kind"] for each in told} == {"clinic"}


def test_a_label_that_no_simulated_client_declares_is_refused(run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"cohort\.label = 'region'.*simulation\.metadata\.region"):
        run(cohort__strategy="diversity", cohort__label="region")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"simulation__metadata": {"region": {"north": 0}}}, r"simulation\.metadata\.region\.north"),
        ({"simulation__metadata": {"region": 1.5}}, r"simulation\.metadata\.region"),
        ({"simulation__capacity": {"gpus": "many"}}, "gpus is a number from 0, not 'many'"),
        ({"simulation__capacity": {"memory": ["16GiB", "x"]}}, "simulation.capacity"),
        (
            {
                "simulation__metadata": {"region": "north"},
                "resources__at_least": [{"silos": 1, "labels": {"region": "south"}}],
            },
            "0 of 8 simulated ones",
        ),
    ],
)
def test_mistakes_are_named(run: Callable[..., Any], overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**overrides)


def test_labels_are_counted_in_the_last_column_of_whole_numbers() -> None:
    values = torch.zeros(5, 2)
    assert label_counts((values, torch.tensor([3, 0, 3, 3, 0])), "client 0") == "0:2 3:3"
    with pytest.raises(ConfigError, match="client 0 is no column of whole numbers"):
        label_counts((values, torch.zeros(5)), "client 0")
    with pytest.raises(ConfigError, match="client 0 has 500 labels"):
        label_counts((torch.arange(500),), "client 0")


def test_what_nobody_states_counts_as_had_and_is_said(run: Callable[..., Any]) -> None:
    said: list[str] = []

    def hear(event: Any) -> None:
        if event.note is not None and event.note.kind == "resources_overlooked":
            said.append(event.note.message)

    run(resources__gpus=1, resources__labels={"region": "north"}, rounds=1, _progress=hear)
    assert said == [
        "warning: no simulated client states resources.gpus, resources.labels.region: taken as had by all"
    ]
