"""Questions under differential privacy: what one row changes, and what is made of noisy sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noisy_surveys import COLUMNS, released, survey

from roundtable.core.analyses.noisy.noisy_cells import independence
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_reading import DataTable
from roundtable.privacy import solve_noise, sums_charge

NOISY: list[dict[str, Any]] = [
    {"ask": "describe", "columns": ["age", "rate"], "by": "kind"},
    {"ask": "t_test", "column": "rate", "by": "sex"},
    {"ask": "linear", "outcome": "rate", "on": ["age", "kind", "sex"]},
    {"ask": "correlation", "columns": ["age", "rate"], "weight": 3.0},
    {"ask": "histogram", "column": "age", "bins": 7, "by": "sex"},
    {"ask": "quantiles", "column": "rate", "at": [0.5, 0.9]},
    {"ask": "table", "rows": "kind", "columns": "sex"},
    {"ask": "top_values", "column": "age", "every": 5, "most": 3},
    {"ask": "top_values", "column": "kind"},
]
TIMES = {"time": "age", "event": "sex", "every": 5.0}
EXACT: list[dict[str, Any]] = [
    {"ask": "anova", "column": "rate", "by": "kind"},
    {"ask": "negative_binomial", "outcome": "age", "on": ["rate"]},
    {"ask": "elastic_net", "outcome": "rate", "on": ["age"], "penalty": 0.1},
    {"ask": "meta_analysis", "outcome": "rate", "on": ["age"]},
    {"ask": "mixed_intercept", "outcome": "rate", "on": ["age"]},
    {"ask": "components", "columns": ["age", "rate"]},
    {"ask": "mann_whitney", "column": "age", "by": "sex", "every": 1},
    {"ask": "evaluate", "score": "age", "outcome": "sex"},
    {"ask": "cox", **TIMES, "on": ["rate"]},
    {"ask": "weighted_cox", **TIMES, "treatment": "drug", "propensity": ["rate"]},
    {"ask": "concordance", **TIMES, "score": "rate", "score_every": 1.0},
    {"ask": "boosted_trees", "outcome": "rate", "on": ["age"], "held_out": 0.2},
    {"ask": "boosted_trees", "outcome": "rate", "on": ["age"], "objective": "poisson"},
    {"ask": "boosted_trees", "outcome": "age", "event": "sex", "every": 5.0, "on": ["rate"]},
    {"ask": "describe", "columns": ["open"]},
    {"ask": "quantiles", "column": "age", "at": [0.0, 0.5]},
]


number = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -40.0, 0.0, 100.0, 200.0]))
level = st.sampled_from([0.0, 1.0, math.nan])
rows = st.lists(st.tuples(number, number, level, st.one_of(level, st.just(2.0))), min_size=1, max_size=6)


def table(values: list[tuple[float, ...]]) -> DataTable:
    columns = np.array(values, dtype=np.float64).reshape(-1, 4)
    return DataTable({name: columns[:, place] for place, name in enumerate(list(COLUMNS)[:4])}, COLUMNS)


@given(rows)
def test_one_row_changes_a_release_by_no_more_than_is_stated(values: list[tuple[float, ...]]) -> None:
    """Brute force: all sums of a table, and of the same without its last row, whatever that row holds."""
    asked = survey([*NOISY, {"ask": "survival", **TIMES, "by": "kind"}], 1.0)
    parts = []
    for question in asked.questions:
        assert isinstance(question, NoisyQuestion)
        with_it, without = question.added(table(values)), question.added(table(values[:-1]))
        for name, block in question.blocks.items():
            change = np.linalg.norm(with_it[name] - without[name])
            assert with_it[name].shape == block.shape
            assert change <= block.reach * (1 + 1e-9)
        sent = [question.sums(each, {}, 0) for each in (table(values), table(values[:-1]))]
        parts += [(sent[0][name] - sent[1][name]).ravel() for name in question.blocks]
    assert np.linalg.norm(np.concatenate(parts)) <= 1 + 1e-9


def test_the_stated_change_is_reached() -> None:
    """Nothing of the budget is left unused where a row lies at the ends of all ranges, but by ties in a
    category, of whose columns one alone can be 1."""
    asked = survey([{"ask": "linear", "outcome": "rate", "on": ["age", "sex"]}], 1.0)
    sent = asked.questions[0].sums(table([(100.0, 200.0, 1.0, 0.0)]), {}, 0)["products"]
    assert np.linalg.norm(sent) == pytest.approx(1.0)


def people(rows: int, seed: int = 1) -> DataTable:
    draw = np.random.default_rng(seed)
    sex, kind = (draw.integers(0, most, rows).astype(np.float64) for most in (2, 3))
    age = np.clip(draw.normal(50, 15, rows), 0, 100)
    rate = np.clip(150 - age + 10 * sex + draw.normal(0, 10, rows), -40, 200)
    age[:3] = np.nan
    return DataTable({"age": age, "rate": rate, "sex": sex, "kind": kind}, COLUMNS)


def test_almost_without_noise_answers_are_those_of_the_pooled_rows() -> None:
    tables = [people(300, seed) for seed in (1, 2)]
    age, rate, sex, kind = (
        np.concatenate([each.columns[name] for each in tables]) for name in ("age", "rate", "sex", "kind")
    )
    whole = ~np.isnan(age)
    questions = [question for question in NOISY if question.get("by") != "kind"]
    asked = survey([{"ask": "describe", "columns": ["age", "rate"]}, *questions], 1e-7)
    describe, test, linear, correlation, histogram, quantiles, cells, top, _ = released(asked, tables, 1e-7)
    told = describe.values["age"]["all"]
    assert (round(told["count"]), round(told["missing"])) == (594, 6)
    assert told["mean"] == pytest.approx(age[whole].mean(), abs=1e-5)
    assert told["sd"] == pytest.approx(age[whole].std(), abs=1e-4)
    assert told["mean_error"] == pytest.approx(age[whole].std() / math.sqrt(594), rel=1e-3)
    assert test.values["difference"] == pytest.approx(rate[sex == 0].mean() - rate[sex == 1].mean(), abs=1e-4)
    design = np.column_stack([np.ones(600), age, kind == 1, kind == 2, sex])[whole]
    found, residual, *_ = np.linalg.lstsq(design, rate[whole], rcond=None)
    assert linear.values["coefficients"] == pytest.approx(found.tolist(), rel=1e-4)
    scale = residual[0] / (594 - 5)
    errors = np.sqrt(scale * np.diag(np.linalg.inv(design.T @ design)))
    assert linear.values["errors"] == pytest.approx(errors.tolist(), rel=1e-4)
    r = np.corrcoef(age[whole], rate[whole])[0, 1]
    assert correlation.values["correlation"][0][1] == pytest.approx(r, abs=1e-5)
    counted = np.histogram(age[whole & (sex == 1)], np.linspace(0, 100, 8))[0]
    assert np.allclose(histogram.values["counts"]["m"], counted, atol=1e-3)
    median = quantiles.values["quantiles"][0]
    assert abs(median["value"] - np.median(rate)) < quantiles.values["bin"]
    assert median["interval"][0] <= np.median(rate) <= median["interval"][1]
    assert round(cells.values["counts"][2][1]) == ((kind == 2) & (sex == 1)).sum()
    best = np.bincount(np.floor(age[whole] / 5 + 0.5).astype(int)).max()
    assert round(top.values["values"][0][1]) == best


@pytest.mark.parametrize("people_there", [0, 3, 40])
def test_a_release_that_the_noise_drowns_says_so_and_has_no_nan(people_there: int) -> None:
    asked = survey(NOISY, 30.0)
    table = DataTable({k: v[:people_there] for k, v in people(100).columns.items()}, COLUMNS)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for each in value:
                check(each)
        elif isinstance(value, float):
            assert math.isfinite(value)

    for seed in range(5):
        answers = released(asked, [table, table], 30.0, seed)
        for answer in answers:
            check([dict(answer.values), [list(row) for row in answer.rows]])
        assert "noise" in answers[2].why, "a regression of nothing has no coefficients"
        assert any("below 0 by the noise" in note for note in answers[0].notes)
        assert all(row[2] >= 0 for row in answers[0].rows)


def test_intervals_of_a_mean_hold_where_naive_ones_do_not() -> None:
    """Of 100 surveys of 200 rows at epsilon 0.4, as many as 95 % promise, three standard errors aside."""
    noise = solve_noise(sums_charge(1.0), 0.4, 1e-6).noise_multiplier
    asked = survey([{"ask": "describe", "columns": ["age"]}], noise)
    held = naive = 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        rows = DataTable({"age": np.clip(draw.normal(70, 10, 200), 0, 100)}, COLUMNS)
        told = released(asked, [rows], noise, seed)[0].values["age"]["all"]
        held += told["mean_interval"][0] <= 70 <= told["mean_interval"][1]
        naive += told["mean"] is not None and abs(told["mean"] - 70) <= 1.96 * 10 / math.sqrt(200)
    assert 88 <= held <= 100
    assert naive < 60


def test_independence_is_not_found_in_noise() -> None:
    """As many small p as of any test: a chi-square distribution would give one of nearly all of these."""
    draw = np.random.default_rng(5)
    small = 0
    for _ in range(40):
        cells = draw.multinomial(2000, [0.25, 0.25, 0.25, 0.25]).reshape(2, 2) + draw.normal(0, 40, (2, 2))
        tested = independence(cells, 40.0)
        assert tested is not None
        small += tested[1] < 0.05
    assert small <= 7
    assert independence(np.array([[400.0, 100.0], [100.0, 400.0]]), 5.0)[1] < 0.01  # type: ignore[index]
    assert independence(np.array([[4.0, 1.0], [1.0, 4.0]]), 5.0) is None


@pytest.mark.parametrize("question", EXACT, ids=lambda each: each["ask"])
def test_what_has_no_bounded_sums_is_refused_with_the_reason(question: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        survey([question], 1.0)
    said = str(refused.value)
    assert "question 1" in said
    assert "not answered under [privacy]: " in said or "no least and most" in said or "0 and 1" in said


def test_a_budget_is_divided_by_weights_and_no_budget_has_none() -> None:
    asked = survey([NOISY[4], {**NOISY[4], "weight": 3.0}], 1.0)
    assert asked.shares == pytest.approx([0.25, 0.75])
    with pytest.raises(ConfigError, match=r"no \[privacy\]"):
        survey([{**NOISY[4], "weight": 3.0}], None)


SURVIVAL = {"ask": "survival", "time": "age", "event": "sex", "every": 5.0, "until": 50.0}


def followed(rows: int, seed: int, hazard: float = 0.02) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    time, last = draw.exponential(1 / hazard, rows), draw.uniform(0, 160, rows)
    both = np.minimum(np.minimum(time, last), 100)
    return {"age": both, "sex": ((time <= last) & (time <= 100)) * 1.0}


def exact_answer(question: dict[str, Any], rows: DataTable) -> Any:
    asked = survey([question], None)
    public = asked.public_places.unpack(torch.zeros(asked.public_places.size))
    [answer] = asked.answers(asked.step(public, asked.sums(rows, public)))
    return answer


def test_almost_without_noise_curves_are_kaplan_and_meiers() -> None:
    """Curve, bands where Greenwood's say as much, mean and test: those of an exact survey."""
    groups = [followed(1500, 1), followed(1500, 2, 0.03)]
    rows = {name: np.concatenate([each[name] for each in groups]) for name in groups[0]}
    table = DataTable({**rows, "drug": np.repeat([0.0, 1.0], 1500)}, COLUMNS)
    question = {**SURVIVAL, "by": "drug"}
    [noisy], known = released(survey([question], 1e-6), [table], 1e-6), exact_answer(question, table)
    for label, curve in known.values["curves"].items():
        own = noisy.values["curves"][label]
        assert own["survival"] == pytest.approx(curve["survival"], rel=1e-6)
        assert own["restricted"]["mean"] == pytest.approx(curve["restricted"]["mean"], rel=1e-6)
        assert own["restricted"]["error"] == pytest.approx(curve["restricted"]["error"], rel=1e-4)
        assert own["median"] == curve["median"]
        assert own["lower"] == pytest.approx(curve["lower"], abs=0.01)
    assert noisy.values["log_rank"]["chi2"] == pytest.approx(known.values["log_rank"]["chi2"], rel=1e-4)


def test_bands_and_the_log_rank_test_count_the_noise_in() -> None:
    """Of 100 surveys of 2,000 rows in two groups alike at epsilon 1, three standard errors aside."""
    noise = solve_noise(sums_charge(1.0), 1.0, 1e-6).noise_multiplier
    asked, held, means, small = survey([{**SURVIVAL, "by": "drug"}], noise), 0, 0, 0
    # S at the end of an interval of 5 is what exp(−0.02 t) is there.
    true, mean = math.exp(-0.02 * 50), sum(5 * math.exp(-0.02 * start) for start in range(0, 50, 5))
    for seed in range(100):
        group = np.arange(2000) % 2 * 1.0
        [answer] = released(asked, [DataTable({**followed(2000, seed), "drug": group}, COLUMNS)], noise, seed)
        curve = answer.values["curves"]["yes"]
        held += curve["lower"][9] <= true <= curve["upper"][9]
        low, high = curve["restricted"]["interval"]
        means += low <= mean <= high
        small += answer.values["log_rank"]["p"] < 0.05
    assert held >= 88
    assert means >= 88
    assert small <= 12


def test_a_curve_ends_where_the_noise_hides_who_is_at_risk() -> None:
    asked = survey([SURVIVAL], 10.0)
    [some] = released(asked, [DataTable(followed(400, 1), COLUMNS)], 10.0)
    assert 0 < len(some.values["curves"]["all"]["times"]) < 20
    assert any("curves end at" in note for note in some.notes)
    [none] = released(asked, [DataTable(followed(5, 1), COLUMNS)], 10.0)
    assert "nobody is at risk" in none.why
