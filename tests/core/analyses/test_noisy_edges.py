"""What noisy questions say of tables that have no answer: a clear refusal, or figures that hold."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from noisy_surveys import COLUMNS, released, survey

from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.privacy import solve_noise, sums_charge

WHOLE = {**COLUMNS, "counts": ColumnTable(least=0, most=12)}
LOGISTIC = {"ask": "logistic", "outcome": "sex", "on": ["age", "rate"]}
POISSON = {"ask": "poisson", "outcome": "counts", "on": ["age", "rate"]}
LINEAR = {"ask": "linear", "outcome": "counts", "on": ["age", "rate"]}
SURVIVAL = {"ask": "survival", "time": "age", "event": "sex", "every": 10.0, "by": "drug", "until": 50.0}
SEPARATION, SINGULAR = "perfect separation", "the noise is as large"


def people(**changed: Any) -> DataTable:
    """Of 20,000 the logit of being a man is (age − 50) / 50; the columns in `changed` are others."""
    draw = np.random.default_rng(3)
    n = 20_000
    age, rate = draw.uniform(0, 100, n), draw.uniform(-40, 200, n)
    sex = (draw.random(n) < 1 / (1 + np.exp(-(age - 50) / 50))) * 1.0
    rows = {"age": age, "rate": rate, "sex": sex, "counts": draw.poisson(2.0, n) * 1.0}
    rows["drug"] = (draw.random(n) < 0.5) * 1.0
    made = {name: make(rows) if callable(make) else np.full(n, make) for name, make in changed.items()}
    return DataTable({**rows, **made}, WHOLE)


@cache
def noise() -> float:
    return solve_noise(sums_charge(1.0), 4.0, 1e-6).noise_multiplier


def answer(question: dict[str, Any], table: DataTable, seed: int = 0) -> Any:
    return released(survey([question], noise(), WHOLE), [table], noise(), seed)[0]


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("a column tells the outcome", LOGISTIC, {"sex": lambda t: (t["age"] > 50) * 1.0}, SEPARATION),
    ("two groups apart", LOGISTIC, {"age": lambda t: 10 + 80 * t["sex"]}, SEPARATION),
    ("one outcome alone", LOGISTIC, {"sex": 1.0}, "no rows have sex = f"),
    ("the other outcome alone", LOGISTIC, {"sex": 0.0}, "no rows have sex = m"),
    ("a constant column", LOGISTIC, {"rate": 80.0}, SINGULAR),
    ("the same column twice", LOGISTIC, {"rate": lambda t: 2.4 * t["age"] - 40}, SINGULAR),
    ("the same column twice", LINEAR, {"rate": lambda t: 2.4 * t["age"] - 40}, SINGULAR),
    ("a constant column", POISSON, {"rate": 80.0}, SINGULAR),
    ("nothing is counted", POISSON, {"counts": 0.0}, "nothing is counted"),
    ("nobody is followed", SURVIVAL, {"age": math.nan}, "nobody is at risk"),
]


@pytest.mark.parametrize(("why", "question", "changed", "said"), CASES, ids=lambda each: str(each)[:30])
def test_what_has_no_answer_is_refused_with_the_reason(
    why: str, question: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    assert not answer(question, people()).why, "the table without the change has an answer"
    found = answer(question, people(**changed))
    assert said in found.why
    assert not found.values


def test_separation_is_no_answer_whatever_the_noise_draws() -> None:
    told = [answer(LOGISTIC, people(sex=lambda t: (t["age"] > 50) * 1.0), seed).why for seed in range(10)]
    assert all(told)


def test_curves_of_people_who_are_all_censored_stay_at_the_top() -> None:
    """Nobody has the event: the bands hold the true share, 1, and the log-rank test sees no difference."""
    found = answer(SURVIVAL, people(sex=0.0))
    assert not found.why
    for curve in found.values["curves"].values():
        assert min(curve["survival"]) > 0.9
        assert max(curve["upper"]) <= 1.0
        assert all(low <= 1.0 for low in curve["lower"])
        assert curve["median"] is None
        assert curve["restricted"]["mean"] == pytest.approx(50.0, abs=1.0)
    p = found.values["log_rank"]["p"]
    assert p is None or p > 1e-4


@pytest.mark.parametrize("splits", ["random", "best"])
@pytest.mark.parametrize("changed", [{"sex": 1.0}, {"age": 50.0, "rate": 80.0}, {"age": math.nan}], ids=str)
def test_trees_of_nothing_to_learn_are_finite_or_none(splits: str, changed: dict[str, Any]) -> None:
    question = {"ask": "boosted_trees", "outcome": "sex", "on": ["age", "rate"], "splits": splits}
    found = answer({**question, "rounds": 3, "max_depth": 2, "bins": 4}, people(**changed))
    if found.model is None:
        assert found.why
        return
    trees = found.model["learner"]["gradient_booster"]["model"]["trees"]
    weights = [weight for tree in trees for weight in tree["base_weights"]]
    assert np.isfinite(weights).all()
    assert np.abs(weights).max() < 10
