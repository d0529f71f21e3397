"""Quantiles by bisection are NumPy's within the stated width, and no bracket ends with few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

SPAN = {"x": ColumnTable(least=0.0, most=100.0)}
BISECTED = {"ask": "quantiles", "column": "x", "search": "bisection", "within": 0.01}


def survey_of(least: int, **change: Any) -> Survey:
    asked = TypeAdapter(AnyQuestion).validate_python({**BISECTED, **change})
    return Survey.of(SPAN, [asked], least)


def rounds_of(survey: Survey, values: np.ndarray, lie_in: int = -1) -> list[dict[str, Any]]:
    """The public and kept numbers after each round, over three silos."""
    shapes = {**survey.public_places.shapes, **survey.kept_places.shapes}
    held: dict[str, Any] = {name: np.zeros(shape) for name, shape in shapes.items()}
    found = []
    for round in range(1, survey.rounds + 1):
        totals: dict[str, Any] = {name: np.zeros(shape) for name, shape in survey.sum_places.counts.items()}
        for silo in range(3):
            for name, sums in survey.sums(DataTable({"x": values[silo::3]}, SPAN), held).items():
                totals[name] += sums
        if round == lie_in:
            totals["0.halves"][0] += 1
        held = survey.step({**held, "silos": np.array([3.0])}, totals)
        found.append(held)
        if not survey.open(held):
            break
    return found


def answer_of(survey: Survey, values: np.ndarray) -> Any:
    return survey.answers({**rounds_of(survey, values)[-1], "silos": np.array([3.0])})[0]


@pytest.mark.parametrize("method", ["linear", "inverted_cdf"])
def test_quantiles_are_numpys_within_the_stated_width(method: str) -> None:
    values = np.random.default_rng(0).gamma(3.0, 8.0, 4001).clip(0, 100)
    values[::50] = np.nan
    at = (0.05, 0.25, 0.5, 0.731, 0.9)
    survey = survey_of(1, at=at, method=method)
    answer = answer_of(survey, values)
    wanted = np.quantile(values[~np.isnan(values)], at, method=method)  # type: ignore[call-overload]
    found = answer.values["quantiles"]
    assert answer.values["rows"] == 3920
    assert all(0 < each["within"] <= 0.005 for each in found)
    for each, value in zip(found, wanted, strict=True):
        assert abs(each["value"] - value) <= each["within"] * (1 + 1e-9)
    assert survey.rounds == 1 + 14
    assert survey.sum_places.counts == {"0.rows": (1,), "0.halves": (10, 2)}
    assert answer.notes == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=6, max_size=60),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_no_bracket_has_few_rows_and_all_are_apart_or_the_same(
    rows: list[int], at: list[float], least: int
) -> None:
    """What is published are brackets; the counts of which a difference may be small never are."""
    values = np.array(rows, float)
    survey = survey_of(least, at=at, within=0.7)
    (question,) = survey.questions
    ranks = [rank for pair in question.ranks(len(rows)) for rank in pair[:2]]  # type: ignore[attr-defined]
    for after in rounds_of(survey, values):
        assert not {"0.below", "0.inside"} & set(survey.public_places.shapes)
        brackets = list(zip(after["0.low"], after["0.high"], strict=True))
        for (low, high), rank in zip(brackets, ranks, strict=True):
            inside = (values >= low) & (values < high)
            assert inside.sum() >= least
            assert low <= np.sort(values)[rank] < high
            for other in brackets:
                assert other == (low, high) or other[0] >= high or other[1] <= low
    for each, share in zip(answer_of(survey, values).values["quantiles"], at, strict=True):
        if least == 1:
            assert abs(each["value"] - np.quantile(values, share)) <= each["within"] * (1 + 1e-9)


def test_it_stops_where_a_half_would_hold_fewer_than_the_least_count() -> None:
    values = np.concatenate([np.linspace(10, 12, 300), [90.0, 91.0]])
    answer = answer_of(survey_of(5, at=[0.5, 1.0]), values)
    middle, end = answer.values["quantiles"]
    assert middle["within"] < 0.04
    # The fifth largest value has 2 rows above it: its bracket reaches down to where 5 are.
    assert abs(end["value"] - np.sort(values)[-5]) <= end["within"]
    assert "a half would hold fewer than 5 rows" in answer.notes[-1]


def test_lies_and_what_cannot_be_are_refused() -> None:
    with pytest.raises(AggregationError, match="a silo sent something else than its counts"):
        rounds_of(survey_of(1), np.linspace(0, 100, 90), lie_in=4)
    for change, said in (
        ({"within": None}, "takes within"),
        ({"search": "histogram"}, 'within is of search = "bisection"'),
    ):
        with pytest.raises(ValidationError, match=said):
            survey_of(5, **change)
    with pytest.raises(ConfigError, match="takes 67 halvings"):
        survey_of(5, within=1e-18)
    asked = TypeAdapter(AnyQuestion).validate_python(BISECTED)
    with pytest.raises(ConfigError, match=r"bisection.*\[privacy\]"):
        Survey.of(SPAN, [asked], 5, 1.0)
