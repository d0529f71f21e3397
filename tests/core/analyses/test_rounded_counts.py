"""Counts are told as multiples of a number, and nothing that is told beside them is made of others."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from roundtable.core.analyses.question import HIDDEN, Answer
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

KINDS = ColumnTable(kind="category", values=("a", "b", "c"))
COLUMNS = {"one": KINDS, "two": KINDS, "age": ColumnTable(least=0, most=3)}
ASKED: list[dict[str, Any]] = [
    {"ask": "histogram", "column": "age", "bins": 3},
    {"ask": "histogram", "column": "age", "bins": 3, "by": "two"},
    {"ask": "table", "rows": "one", "columns": "two"},
    {"ask": "top_values", "column": "one", "most": 3},
]


def survey_of(asked: list[dict[str, Any]], round_to: int, noise: float | None = None) -> Survey:
    questions = [TypeAdapter(AnyQuestion).validate_python(each) for each in asked]
    return Survey.of(COLUMNS, questions, 5, noise, round_to=round_to)


@cache
def counting(round_to: int) -> Survey:
    """All that tells counts alone."""
    return survey_of(ASKED, round_to)


def public_of(survey: Survey, silos: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """All that the one round publishes."""
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    parts = [survey.sum_places.encode(survey.sums(DataTable(silo, survey.columns), public)) for silo in silos]
    mean = torch.stack(parts).double().mean(dim=0).float()
    after = survey.step({**public, "silos": np.array([2.0])}, survey.sum_places.decode(mean, len(parts)))
    return {name: after[name] for name in public}


def silos_of(seed: int, rows: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [
        {name: draw.choice(3, rows, p=(0.6, 0.3, 0.1)).astype(np.float64) for name in COLUMNS}
        for _ in range(2)
    ]


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 120), st.sampled_from([2, 5, 10]))
def test_what_is_published_follows_from_rounded_counts(seed: int, rows: int, round_to: int) -> None:
    silos = silos_of(seed, rows)
    before, after = (public_of(counting(each), silos) for each in (1, round_to))
    for number in range(3):
        true, told = before[f"{number}.cells"], after[f"{number}.cells"]
        assert np.array_equal(true == HIDDEN, told == HIDDEN)
        shown = true != HIDDEN
        assert (told[shown] % round_to == 0).all()
        assert (np.abs(told - true)[shown] <= round_to / 2).all()
    counted = np.bincount(np.concatenate([silo["one"] for silo in silos]).astype(int), minlength=3)
    near = ((2 * counted + round_to) // (2 * round_to) * round_to).tolist()
    wanted = [(place, each) for place, each in enumerate(near) if counted[place] >= 5]
    wanted = sorted((each for each in wanted if each[1]), key=lambda each: (-each[1], each[0]))
    told = zip(after["3.places"].tolist(), after["3.rows"].tolist(), strict=True)
    assert [(int(place), int(count)) for place, count in told if count] == wanted


def test_tests_are_made_of_what_is_told_and_answers_say_so() -> None:
    silos = silos_of(3, 400)
    survey = survey_of(ASKED[2:3], 10)
    public = public_of(survey, silos)
    answer: Answer = survey.answers(public)[0]
    again = survey_of([{**ASKED[2]}], 1)
    assert answer.values == again.answers(public)[0].values
    assert answer.values["chi2"] > 0
    assert answer.notes[-1] == "counts are rounded to multiples of 10, and all else is made of those"


def test_a_value_that_rounds_to_no_rows_is_not_told_and_the_note_says_from_where_on() -> None:
    silos = [{name: np.repeat([0.0, 1.0], [80, 20]) for name in COLUMNS}] * 2
    survey = counting(100)
    answer = survey.answers(public_of(survey, silos))[3]
    assert answer.values == {"values": [["a", 200]]}
    assert answer.notes[0] == "no other value is that of 50 rows"


def test_what_tells_of_more_than_counts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"round_to = 5 rounds counts, and describe tells of more"):
        survey_of([*ASKED, {"ask": "describe", "columns": ["age"]}], 5)
    with pytest.raises(ConfigError, match=r"under \[privacy\] none is told"):
        survey_of(ASKED[:1], 5, 2.0)
