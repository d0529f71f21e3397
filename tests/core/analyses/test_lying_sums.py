"""A silo that sends sums which no table has: refused where the total shows it, in the clear by digit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roundtable.client.analysis_task import AnalysisTask
from roundtable.core.algorithms.analysis import AnalysisTable
from roundtable.core.analyses.exact_sums import Doubles, largest_digit
from roundtable.core.analyses.survey import Survey
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError
from roundtable.core.initial_model import initial_model
from roundtable.core.tables.table_reading import DataTable
from roundtable.engine.analysis_job import analysis_job
from roundtable.server.jobs.plain_rounds import PlainRounds

SILOS = 3
COLUMNS = {
    "age": {"least": 0, "most": 100},
    "days": {"least": 0, "most": 100},
    "ill": {"kind": "category", "values": ["no", "yes"]},
}
Lie = Callable[[dict[str, Doubles]], None]


def job_of(question: dict[str, Any], masked: bool = True) -> JobConfig:
    asked = {"table": "people", "columns": COLUMNS, "questions": [question]}
    return analysis_job(asked, SILOS, masked=masked, name="people")


def answered(survey: Survey, round: int, lie: Lie) -> dict[str, Doubles]:
    """The public numbers after so many rounds over three tables, the last one's sums then changed."""
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    for number in range(1, round + 1):
        totals: dict[str, Doubles] = {}
        for silo in range(SILOS):
            ages = np.random.default_rng(silo).uniform(0, 100, 50)
            sums = survey.sums(DataTable({"age": ages}, survey.columns), public)
            sums = {name: np.array(values) for name, values in sums.items()}
            if silo == 2 and number == round:
                lie(cast("dict[str, Doubles]", sums))
            for name, values in cast("dict[str, Doubles]", sums).items():
                totals[name] = totals.get(name, np.zeros(values.shape)) + values
        public = survey.step({**public, "silos": np.array([3.0])}, totals)
    return public


def honest(sums: dict[str, Doubles]) -> None:
    return


def more_rows(sums: dict[str, Doubles]) -> None:
    sums["0.bins"][0, 5] += 10**6


def no_rows(sums: dict[str, Doubles]) -> None:
    sums["0.bins"][:] = 0


def far_sum(sums: dict[str, Doubles]) -> None:
    sums["0.first"][:] = 1e9


def below_zero(sums: dict[str, Doubles]) -> None:
    sums["0.second"][:] = -1e6


@pytest.mark.parametrize(
    ("question", "round", "lie"),
    [
        ({"ask": "quantiles", "column": "age"}, 2, more_rows),
        ({"ask": "quantiles", "column": "age"}, 3, no_rows),
        ({"ask": "describe", "columns": ["age"]}, 2, far_sum),
        ({"ask": "describe", "columns": ["age"]}, 3, far_sum),
        ({"ask": "describe", "columns": ["age"]}, 3, below_zero),
    ],
)
def test_sums_that_no_rows_have_are_refused(question: dict[str, Any], round: int, lie: Lie) -> None:
    table = job_of(question).algorithm
    assert isinstance(table, AnalysisTable)
    answered(table.survey, round, honest)
    with pytest.raises(AggregationError, match="a silo sent something else"):
        answered(table.survey, round, lie)


def test_no_count_makes_the_coordinator_work_for_ever() -> None:
    """Efron's ties take a step for each event of an interval: a silo could tell of 2^33."""
    question = {"ask": "cox", "time": "days", "event": "ill", "every": 10, "on": ["age"]}
    table = job_of(question).algorithm
    assert isinstance(table, AnalysisTable)
    (cox,) = table.survey.questions
    counts = {name: np.full(shape, 2.0**33) for name, shape in cox.counts.items()}
    found = cox.step({}, counts, 0)
    assert "Efron" in cox.report({"stage": np.array([found["stage"]]), "blame": np.array([-1.0])}).why


@pytest.mark.parametrize("lie", [-1.0, 0.5, largest_digit(SILOS) + 1.0, float("nan"), float("inf")])
def test_in_the_clear_each_silos_digits_are_looked_at(lie: float) -> None:
    job = job_of({"ask": "describe", "columns": ["age"]}, masked=False)
    sent = initial_model(job, AnalysisTask()).layout.sent
    rounds = PlainRounds(job, sent, cast("Any", None))
    digits = np.zeros(sent.size, dtype="<f4")
    digits[-1] = largest_digit(SILOS)
    offer = cast(
        "Any",
        SimpleNamespace(encoding="float32", at=SimpleNamespace(step=SimpleNamespace(round=1, attempt=1))),
    )
    for last, flaw in ((digits[-1], ""), (lie, f"element {sent.size - 1} is no whole number from 0 to")):
        check = rounds.content_check("alder", offer)
        digits[-1] = last
        check(digits.tobytes())
        assert (flaw in check.flaw(Path())) is True
        assert bool(check.flaw(Path())) is bool(flaw)
