"""What the validation policies do to a round, as a run's events tell it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_tasks import Perceptron, world

from roundtable.client.training.task_composition import check_task_with
from roundtable.core.errors import ConfigError
from roundtable.simulation import Result
from roundtable.simulation.world.attackers import Attackers

Run = Callable[..., Result]
ATTACK = {"name": "gaussian", "scale": 100.0, "count": 2}


def outcome(run: Run, folder: Path, **settings: Any) -> tuple[Result, list[str], list[dict[str, Any]]]:
    """The run, who was hostile in it, and its events."""
    found = run(cohort__size=8, rounds=2, _run_dir=folder, **settings)
    hostile = [f"client-{index}" for index in range(8) if index in Attackers.of(found.job)]
    lines = (folder / "events.jsonl").read_text().splitlines()
    return found, hostile, [json.loads(line) for line in lines]


@pytest.mark.parametrize(("policy", "kind"), [("exclude", "update_excluded"), ("clip", "update_clipped")])
def test_each_update_that_is_too_long_is_an_event(run: Run, tmp_path: Path, policy: str, kind: str) -> None:
    validation = {"policy": policy, "max_norm": 20.0}
    found, hostile, events = outcome(
        run, tmp_path, simulation__attack=ATTACK, aggregation__validation=validation
    )
    assert found.status == "finished"
    told = [event for event in events if event["kind"] == kind]
    assert [(event["round"], event["client"]) for event in told] == [
        (number, name) for number in (1, 2) for name in hostile
    ]
    assert all("exceeds the bound 20" in event["message"] for event in told)
    contributors = found.history.records[0].contributors
    assert set(hostile) <= set(contributors) if policy == "clip" else not set(hostile) & set(contributors)


def test_a_job_that_fails_on_bad_updates_stops_and_names_the_silo(run: Run, tmp_path: Path) -> None:
    validation = {"policy": "fail", "max_norm": 20.0}
    found, hostile, events = outcome(
        run, tmp_path, simulation__attack=ATTACK, aggregation__validation=validation, cohort__retries=1
    )
    assert found.status == "paused"
    failed = [event["message"] for event in events if event["kind"] == "attempt_failed"]
    assert len(failed) == 2
    assert f"update of {hostile[0]}: norm" in failed[0]


def test_broken_updates_are_events_too(run: Run, tmp_path: Path) -> None:
    attack = {"name": "nan", "count": 2}
    _, hostile, events = outcome(run, tmp_path, simulation__attack=attack)
    told = [event for event in events if event["kind"] == "update_excluded"]
    assert [event["client"] for event in told] == hostile * 2
    assert all("not finite" in event["message"] for event in told)


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn", "ditto"])
@pytest.mark.parametrize("table", ["local", "drop"])
def test_steps_that_are_corrected_need_all_parameters(algorithm: str, table: str) -> None:
    """Nothing is known of a parameter that does not travel: a client would fail on it in its first step."""
    own = {"scaffold": "", "feddyn": "alpha = 0.1", "ditto": "pull = 0.5"}[algorithm]
    place = world(Perceptron(), f'name = "{algorithm}"\nsteps = 2\n{own}', f'{table} = ["4.*"]')
    with pytest.raises(ConfigError, match=rf"{algorithm}.*'4\.weight'"):
        check_task_with(place.job, place.algorithm, place.task, place.layout)
    whole = world(Perceptron(), f'name = "{algorithm}"\nsteps = 2\n{own}')
    check_task_with(whole.job, whole.algorithm, whole.task, whole.layout)
