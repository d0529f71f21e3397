"""Questions under differential privacy that take several rounds: what one row changes over all of them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_surveys import COLUMNS, released, survey

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.errors import ProtocolError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.privacy import compose, solve_noise, sums_charge

TREES: list[dict[str, Any]] = [
    {"outcome": "sex", "on": ["age", "rate", "kind"], "max_depth": 2, "bins": 4, "splits": "best"},
    {"outcome": "rate", "on": ["age", "sex"], "max_depth": 3, "cuts": "equal"},
    {"outcome": "kind", "on": ["age", "rate"], "max_depth": 2, "splits": "best", "base_score": 0.5},
]
ROUNDS = [{"ask": "boosted_trees", "rounds": 3, **each} for each in TREES]
NAMES = ("age", "rate", "sex", "kind")
number = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -40.0, 0.0, 100.0, 200.0]))
level = st.sampled_from([0.0, 1.0, math.nan])
row = st.tuples(number, number, level, st.one_of(level, st.just(2.0)))


def table(rows: np.ndarray) -> DataTable:
    return DataTable({name: rows[:, place].copy() for place, name in enumerate(NAMES)}, COLUMNS)


def drawn(rows: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    age, rate = draw.uniform(0, 100, rows), draw.uniform(-40, 200, rows)
    return np.column_stack([age, rate, (age + rate > 120) * 1.0, draw.integers(0, 3, rows)])


@pytest.mark.parametrize("hostile", [False, True])
@settings(max_examples=5)
@given(row, st.integers(0, 5))
def test_one_row_changes_all_rounds_together_by_1(hostile: bool, one: tuple[float, ...], seed: int) -> None:
    """Whatever the row holds and the coordinator publishes between rounds; and each round as charged."""
    asked = survey(ROUNDS, 0.3)
    rows = drawn(30, seed)
    tables = [table(rows), table(np.vstack([rows, one]))]
    found: list[float] = []

    def look(stage: int, public: dict[str, Doubles]) -> None:
        asked.check_stage(public, stage)
        if hostile and stage:
            public = {name: values.copy() for name, values in public.items()}
            for number in range(len(ROUNDS)):
                public[f"{number}.weight"][:] = np.where(public[f"{number}.weight"] > 0, 1e308, -1e38)
                public[f"{number}.base"][:] = [-1e300, 7.0, 1e30][(seed + stage + number) % 3]
        sent = [asked.sums(each, public) for each in tables]
        change = sum(float(((sent[0][name] - sent[1][name]) ** 2).sum()) for name in sent[0])
        assert change <= asked.round_shares[stage] * (1 + 1e-9)
        found.append(change)

    released(asked, [table(rows)], 0.3, seed, look)
    assert len(found) == asked.rounds
    assert sum(found) <= 1 + 1e-9
    assert math.fsum(asked.round_shares) == pytest.approx(1.0)


def test_the_rounds_cost_what_one_release_does() -> None:
    noise = solve_noise(sums_charge(1.0), 1.0, 1e-6).noise_multiplier
    asked = survey([*ROUNDS, {"ask": "describe", "columns": ["age"], "weight": 2.0}], noise)
    charges = [sums_charge(noise / math.sqrt(share)) for share in asked.round_shares]
    assert compose(charges, 1e-6) == pytest.approx(compose([sums_charge(noise)], 1e-6), rel=1e-9)
    assert asked.shares is not None
    for question, share in zip(asked.questions, asked.shares, strict=True):
        assert isinstance(question, NoisyQuestion)
        assert sum(map(question.change, range(asked.rounds))) == pytest.approx(share)


def test_public_numbers_of_another_round_are_refused() -> None:
    asked = survey(ROUNDS[:1], 1.0)

    def look(stage: int, public: dict[str, Doubles]) -> None:
        with pytest.raises(ProtocolError, match="in order"):
            asked.check_stage(public, stage + 1)
        with pytest.raises(ProtocolError, match="in order"):
            asked.check_stage({**public, "0.stage": np.array([1000.0])}, stage)

    released(asked, [table(drawn(30, 1))], 1.0, look=look)


def auroc(told: Doubles, outcome: Doubles) -> float:
    first, second = told[outcome == 1], told[outcome == 0]
    return float((first[:, None] > second).mean() + (first[:, None] == second).mean() / 2)


@pytest.mark.parametrize(("splits", "rounds", "bins"), [("random", 25, 64), ("best", 8, 8)])
def test_trees_tell_more_than_the_majority_at_a_useful_epsilon(splits: str, rounds: int, bins: int) -> None:
    """Two silos of 3,000 rows at epsilon 1: seen 0.82 and 0.82, the risk itself has 0.87."""
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it reads the model")
    names = [f"x{place}" for place in range(6)]
    columns = {name: ColumnTable(least=-6, most=6) for name in names}
    columns |= {"ill": ColumnTable(kind="category", values=("no", "yes"))}
    draw = np.random.default_rng(4)
    x = draw.normal(0, 1, (10_000, 6))
    risk = 1.5 * x[:, 0] - x[:, 1] + 0.8 * x[:, 2] * x[:, 3]
    ill = (draw.random(len(x)) < 1 / (1 + np.exp(-risk))) * 1.0
    held = slice(6000, None)
    tables = [
        DataTable({**dict(zip(names, x[part].T, strict=True)), "ill": ill[part]}, columns)
        for part in (slice(start, start + 3000) for start in (0, 3000))
    ]
    noise = solve_noise(sums_charge(1.0), 1.0, 1e-6).noise_multiplier
    question = {"ask": "boosted_trees", "outcome": "ill", "on": names, "splits": splits, "max_depth": 3}
    asked = survey([{**question, "rounds": rounds, "bins": bins}], noise, columns)
    [answer] = released(asked, tables, noise, 3)
    loaded = xgboost.Booster(model_file=bytearray(json.dumps(answer.model).encode()))
    chance = loaded.predict(xgboost.DMatrix(x[held].astype(np.float32), feature_names=names))
    assert auroc(chance, ill[held]) > 0.75
    assert abs(answer.values["n"] - 6000) < 6 * noise * 20
    assert set(answer.values["importance"]) <= set(names)


def test_almost_without_noise_a_number_is_predicted() -> None:
    """Best splits and leaves without noise are those of boosting: the loss falls as fast."""
    rows = drawn(2000, 2)
    question = {"ask": "boosted_trees", "outcome": "rate", "on": ["age", "sex"], "splits": "best"}
    asked = survey([{**question, "rounds": 20, "max_depth": 3}], 1e-6)
    [answer] = released(asked, [table(rows)], 1e-6)
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it reads the model")
    loaded = xgboost.Booster(model_file=bytearray(json.dumps(answer.model).encode()))
    features = rows[:, [0, 2]].astype(np.float32)
    away = loaded.predict(xgboost.DMatrix(features, feature_names=["age", "sex"])) - rows[:, 1]
    settings = {"max_depth": 3, "eta": 0.3, "base_score": float(rows[:, 1].mean())}
    known = xgboost.train(settings, xgboost.DMatrix(features, rows[:, 1]), 20)
    wanted = known.predict(xgboost.DMatrix(features)) - rows[:, 1]
    assert away.std() == pytest.approx(wanted.std(), rel=0.03)


def test_splits_that_the_noise_drowns_are_no_model() -> None:
    asked = survey(ROUNDS[:1], 40.0)
    [answer] = released(asked, [table(drawn(40, 1))], 40.0)
    assert "no split gains anything" in answer.why
    assert answer.model is None
