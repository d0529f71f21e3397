"""Messages as plain values and back, and a job's records as a screen can show them."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from roundtable.core.errors import ConfigError
from roundtable.page.shown_rounds import means, rounds_of, thinned
from roundtable.page.values import message_of, values_of
from roundtable.proto import operator_pb2
from roundtable.web.job_settings import settings_of


def test_a_message_becomes_what_a_browser_can_hold() -> None:
    message = operator_pb2.JobDetail(
        job=operator_pb2.Job(id="a", model={"digest": "d", "size": 1 << 60}),
        clients=[
            operator_pb2.ClientActivity(client="alder", loss=math.nan, figures={"step": 3, "seconds": 0.5})
        ],
        deadline=math.inf,
    )
    values = values_of(message)
    assert values["job"]["model"] == {"digest": "d", "size": str(1 << 60)}
    assert values["clients"][0]["loss"] is None
    assert values["deadline"] is None
    assert values["clients"][0]["figures"] == {"step": 3, "steps": 0, "seconds": 0.5}
    assert "initial_model" not in values
    json.dumps(values, allow_nan=False)
    silo = operator_pb2.Client(name="alder", metadata={"ward": "3"}, tasks=["t"])
    assert values_of(silo)["metadata"] == {"ward": "3"}
    assert values_of(silo)["tasks"] == ["t"]


@pytest.mark.parametrize("wrong", [{"nonsense": 1}, {"job": 3}, {"job": ["a"]}, {"job": {"x": 1}}])
def test_a_browsers_values_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="this is no JobRequest"):
        message_of(operator_pb2.JobRequest, wrong)
    assert message_of(operator_pb2.JobRequest, {"job": "a"}).job == "a"


def test_rounds_are_thinned_out_evenly_and_told_as_means() -> None:
    records = [
        json.dumps(
            {
                "round": number,
                "evaluation": {"accuracy": [number * 2.0, 4], "nothing": [0.0, 0], "bad": [math.inf, 1]},
                "training": {},
                "contributors": ["alder"],
                "cohort": ["alder", "birch"],
                "client_metrics": {"alder": {"accuracy": [1.0, 2]}},
                "charge": {"epsilon": 0.5},
            }
        )
        for number in range(1, 10001)
    ]
    shown = rounds_of(records)
    assert len(shown) == 2000
    assert shown[0]["round"] == 1
    assert shown[-1]["round"] == 10000
    assert shown[0]["evaluation"] == {"accuracy": 0.5}
    assert shown[0]["cohort"] == 2
    assert shown[0]["clients"] == {"alder": {"accuracy": 0.5}}
    assert shown[0]["epsilon"] == 0.5
    gaps = {after["round"] - before["round"] for before, after in itertools.pairwise(shown)}
    assert gaps == {5, 6} or gaps == {5}
    assert thinned(["a", "b"], 2) == ["a", "b"]
    assert means({"loss": [-math.inf, 3]}) == {}


def test_settings_say_which_are_defaults() -> None:
    from roundtable.core import parse_job

    rows = {row["key"]: row for row in settings_of(parse_job('task = "mine"\nrounds = 7').to_json())}
    assert not rows["rounds"]["default"]
    assert rows["rounds"]["value"] == "7"
    assert rows["seed"]["default"]
