"""Messages as plain values and back, and a job's records as a screen can show them."""

from __future__ import annotations

import json
import math

import pytest

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.measures.families import Family
from roundtable.page.shown_rounds import measured_of, rounds_of, silos_of
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


def test_rounds_are_told_as_means_spreads_and_counts() -> None:
    record = {
        "round": 7,
        "evaluation": {"accuracy": [14.0, 4], "nothing": [0.0, 0], "bad": [math.inf, 1]},
        "training": {},
        "contributors": ["alder", "birch"],
        "cohort": ["alder", "birch", "cedar"],
        "failures": {"cedar": "ran out of memory"},
        "client_metrics": {"alder": {"accuracy": [1.0, 2]}, "birch": {"accuracy": [3.0, 2]}},
        "charge": {"epsilon": 0.5},
        "transfers": {
            "alder": {"up": 10, "up_plain": 40, "error": 0.5, "encoding": "int8"},
            "birch": {"up": 20, "up_plain": 40, "encoding": "int8"},
        },
    }
    (shown,) = rounds_of([json.dumps(record)], "")
    assert shown["evaluation"] == {"accuracy": 3.5}
    assert shown["spread"] == {"accuracy": [0.5, 1.5]}
    assert (shown["cohort"], shown["contributors"], shown["failures"], shown["excluded"]) == (3, 2, 1, 0)
    assert shown["epsilon"] == 0.5
    sums = {"up": 30, "up_plain": 80, "down": 0, "down_plain": 0, "error": 0.5, "encodings": {"int8": 2}}
    assert shown["transfers"] == sums
    assert "alder" not in json.dumps(shown)


def test_figures_that_are_not_means_are_told_without_the_sums_that_they_are_made_of() -> None:
    family = Family("risk", "confusion", 2)
    right = {"0_0": [3.0, 4], "0_1": [0.0, 4], "1_0": [0.0, 4], "1_1": [1.0, 4]}
    wrong = {"0_0": [0.0, 4], "0_1": [3.0, 4], "1_0": [1.0, 4], "1_1": [0.0, 4]}
    alder, birch = ({family.key(cell): sums[cell] for cell in family.cells} for sums in (right, wrong))
    config = parse_job('task = "mine"\nrounds = 2\n[metrics]\nshare = "hits / all"').to_json()
    record = {
        "round": 2,
        "evaluation": {**alder, "risk_accuracy": [0.5, 1], "share": [0.25, 1]},
        "client_metrics": {
            "alder": {**alder, "hits": [1.0, 4], "all": [4.0, 4]},
            "birch": {**birch, "hits": [3.0, 4], "all": [4.0, 4]},
        },
    }
    (shown,) = rounds_of([json.dumps(record)], config)
    assert shown["evaluation"] == {"risk_accuracy": 0.5, "share": 0.25}
    assert shown["spread"]["risk_accuracy"] == [0.0, 1.0]
    assert shown["spread"]["share"] == [0.25, 0.75]
    assert "risk.." not in json.dumps(shown)
    later = {"round": 3, "evaluation": {}, "client_metrics": {}}
    told = measured_of([json.dumps(record), json.dumps(later)], config, most=1)
    assert told is not None
    assert (told["round"], list(told["silos"]), told["more"]) == (2, ["alder"], 1)
    assert told["silos"]["alder"]["risk_accuracy"] == 1.0
    assert told["fairness"]["risk_accuracy"]["worst_tenth"] == 0.0
    assert "risk.." not in json.dumps(told)
    assert measured_of([json.dumps(later)], config) is None


def test_the_newest_rounds_are_told_by_silo_and_by_reason() -> None:
    record = {
        "round": 3,
        "contributors": [f"silo-{number}" for number in range(9)],
        "weights": {"silo-8": 0.25},
        "failures": {"late": "did not answer"},
        "excluded": {"liar": "its norm is 9 times the median", "odd": "no reason"},
        "diagnosis": {"excluded": [{"client": "liar", "reason": "norm_ratio", "message": ""}]},
    }
    told = silos_of([json.dumps(record)], most=4)
    assert told["silos"] == ["late", "liar", "odd", "silo-0"]
    assert told["more"] == 8
    (shown,) = told["rounds"]
    assert shown["silos"]["liar"] == ["excluded", "its norm is 9 times the median", None]
    assert shown["silos"]["silo-0"] == ["counted", "", None]
    assert shown["rules"] == {"norm_ratio": 1, "other": 1}
    assert silos_of([json.dumps(record)])["rounds"][0]["silos"]["silo-8"] == ["counted", "", 0.25]
    assert silos_of([]) == {"silos": [], "more": 0, "rounds": []}


def test_settings_say_which_are_defaults() -> None:
    rows = {row["key"]: row for row in settings_of(parse_job('task = "mine"\nrounds = 7').to_json())}
    assert not rows["rounds"]["default"]
    assert rows["rounds"]["value"] == "7"
    assert rows["seed"]["default"]
