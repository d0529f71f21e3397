"""Columns that are constant, or spread over little of their range: a figure is exact, or said not to be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

RNG = np.random.default_rng(5)
ROWS = 200
OWNER = np.arange(ROWS) % 4
X = 50 + 10 * RNG.standard_normal(ROWS)
FRAME = {
    "x": X,
    "y": 3 * X + 5 * RNG.standard_normal(ROWS),
    "sum": 2 * X + 1,
    "same": np.full(ROWS, 36.6),
    "group": RNG.integers(0, 2, ROWS).astype(float),
}
TOLD = "spread over too little of"


def asked(reach: float = 1000.0, **question: Any) -> Answer:
    """The answer where numbers are said to lie within ± `reach`."""
    columns = {name: ColumnTable(least=-reach, most=reach) for name in FRAME}
    columns["group"] = ColumnTable(kind="category", values=("no", "yes"))
    survey = Survey.of(columns, [TypeAdapter(AnyQuestion).validate_python(question)], 1)
    tables = [DataTable({k: v[each == OWNER] for k, v in FRAME.items()}, columns) for each in range(4)]
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    for _ in range(survey.rounds):
        down = survey.public_places.unpack(survey.public_places.pack(public))
        rows = [survey.sum_places.encode(survey.sums(table, down)) for table in tables]
        sums = survey.sum_places.decode(torch.stack(rows).double().mean(dim=0).float(), len(tables))
        public = survey.step({**down, "silos": np.array([float(len(tables))])}, sums)
        if not survey.open(public):
            break
    return survey.answers(public)[0]


@pytest.mark.parametrize("reach", [1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e12])
def test_a_range_that_is_far_too_wide_gives_no_wrong_figure(reach: float) -> None:
    described = asked(reach, ask="describe", columns=["x"])
    found, wanted = described.values["x"]["all"]["sd"], X.std(ddof=1)
    if not described.notes:
        assert found == pytest.approx(wanted, rel=1e-8)
    else:
        within = float(described.notes[0].split("± ")[1].split(";")[0])
        assert abs(found - wanted) <= 1.05 * within
        assert "narrower" in described.notes[0]
    correlated = asked(reach, ask="correlation", columns=["x", "y"])
    found, wanted = correlated.values["correlation"][0][1], np.corrcoef(X, FRAME["y"])[0, 1]
    assert found == pytest.approx(wanted, rel=1e-8) if found else TOLD in correlated.notes[1]
    fitted = asked(reach, ask="linear", outcome="y", on=["x"])
    wanted = np.polyfit(X, FRAME["y"], 1)[0]
    assert TOLD in fitted.why if fitted.why else fitted.rows[1][1] == pytest.approx(wanted, rel=1e-7)
    bad = [bool(each) for each in (described.notes, correlated.notes[1:], fitted.why)]
    assert bad == [reach > 1e6] * 3


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ({"ask": "linear", "outcome": "same", "on": ["x"]}, "singular.*'same'"),
        ({"ask": "linear", "outcome": "x", "on": ["same"]}, "singular.*'same'"),
        ({"ask": "mixed_intercept", "outcome": "same", "on": ["x"]}, "singular.*'same'"),
        ({"ask": "mixed_intercept", "outcome": "sum", "on": ["x"]}, "singular.*'sum'"),
        ({"ask": "meta_analysis", "outcome": "x", "on": ["same"]}, "fewer than three silos"),
        ({"ask": "meta_analysis", "outcome": "same", "on": ["x"]}, "fewer than three silos"),
        ({"ask": "t_test", "column": "same", "by": "group"}, "both groups are constant"),
        ({"ask": "anova", "column": "same", "by": "group"}, "every group is constant"),
        ({"ask": "components", "columns": ["same", "x"]}, "'same' is constant"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["ask"],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_is_constant_has_no_answer(question: dict[str, Any], why: str) -> None:
    for reach in (1e3, 1e5):
        assert re.search(why, asked(reach, **question).why)
