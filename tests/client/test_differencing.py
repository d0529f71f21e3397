"""Studies whose author is after single rows: what they try within one survey, and what they then see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from roundtable import survey_figures
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.client.worker.earlier_readings import EarlierReadings
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.analyses.question import HIDDEN, Question
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.errors import ConfigError, PrivacyError, TaskError
from roundtable.core.initial_model import initial_model
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.task import Site, load_task
from roundtable.surveys import load_survey, survey_job

SURVEY = """
table = "people"
[columns.age]
least = 0
most = 120
[columns.id]
least = 0
most = 100000
{more}
[[questions]]
ask = "describe"
columns = ["age"]
[[questions]]
ask = "correlation"
columns = ["age", "id"]
"""


def answered(folder: Path, more: str, own: dict[str, Any] | None = None, age: str = "") -> Any:
    """What a real silo answers in the first round: 60 people, the last of whom has number 777."""
    ages = np.random.default_rng(0).integers(20, 90, 60)
    rows = [f"{years},{777 if place == 59 else place}" for place, years in enumerate(ages)]
    (folder / "people.csv").write_text("\n".join(["age,id", *rows]) + "\n")
    text = SURVEY.format(more=more).replace("most = 120", age or "most = 120")
    (folder / "survey.toml").write_text(text)
    job = survey_job(load_survey(folder / "survey.toml"), 3)
    algorithm, task = make_algorithm(job.algorithm), load_task("analysis")
    model = initial_model(job, task, algorithm)
    table = {"file": str(folder / "people.csv"), "columns": own or {}}
    data = Site("alder", options={"people": table}).tables
    compare = EarlierReadings(folder / "readings").compare
    work = LocalWork(job, model.layout, model.vector, 1, "alder", None, algorithm, compare=compare)
    return train(task, {}, data, work)


@pytest.mark.parametrize(
    "more", ["missing = [777]", "missing = [-1]\nrecode = { 777 = -1 }", 'recode = { 777 = "na" }']
)
def test_a_study_cannot_leave_out_the_person_whose_number_it_knows(tmp_path: Path, more: str) -> None:
    """Ages of all and of all but one are two sums that differ by that one's age."""
    with pytest.raises(
        PrivacyError, match="fewer than 5 rows of column 'id' that this silo takes for values"
    ):
        answered(tmp_path, more)
    assert not (tmp_path / "readings").exists()
    assert answered(tmp_path, more, {"id": {"missing": [777]}}).delta.isfinite().all()


def test_codes_that_leave_out_many_or_none_are_the_studys_own(tmp_path: Path) -> None:
    for place, more in enumerate(["missing = [-9, 70]", "missing = [0, 1, 2, 3, 4]", 'missing = ["?"]']):
        (tmp_path / str(place)).mkdir()
        assert answered(tmp_path / str(place), more).delta.isfinite().all()


def test_a_range_tells_nobody_how_many_rows_lie_beyond_it(tmp_path: Path) -> None:
    """Nor which: a study that asks again and again would find the oldest. At the silo both are told."""
    with pytest.raises(TaskError, match="data check SURVEY") as caught:
        answered(tmp_path, "", age="most = 80")
    assert not any(figure in str(caught.value) for figure in ("row", "80", "0"))


def asked(
    columns: dict[str, ColumnTable],
    questions: list[dict[str, Any]],
    least: int = 5,
    noise: float | None = None,
) -> Survey:
    tables = TypeAdapter(list[AnyQuestion]).validate_python(questions)
    return Survey.of(columns, tables, least, noise, 3)


def told(survey: Survey, table: DataTable) -> list[Any]:
    public = survey.public_places.unpack(torch.zeros(survey.public_places.size))
    nothing = survey.sum_places.decode(survey.sum_places.encode({}), 1)
    while survey.open(public):
        public = survey.step({**public, "silos": np.ones(1)}, {**nothing, **survey.sums(table, public)})
    return survey.answers(public)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=5), min_size=2, max_size=4), st.integers(1, 9)
)
def test_no_sum_over_a_line_gives_a_hidden_cell_back(lines: list[list[int]], least: int) -> None:
    """What a line's sum leaves after all that is seen is nothing, or several cells of enough rows together,
    unless nothing else is there to hide."""
    width = min(map(len, lines))
    counts = np.array([line[:width] for line in lines], dtype=np.float64)
    hidden = Question({}, least, "").hide_cells(counts, (0, 1))
    assert ((hidden == counts) | (hidden == HIDDEN)).all()
    assert not ((hidden > 0) & (hidden < least)).any()
    for seen, own in [*zip(hidden, counts, strict=True), *zip(hidden.T, counts.T, strict=True)]:
        lost = seen == HIDDEN
        if lost.any() and (seen > 0).any():
            assert lost.sum() > 1
            assert own[lost].sum() >= least


def test_totals_beside_groups_give_no_small_group_back() -> None:
    """Describe and histogram of all, and by hospital, of which one has three people."""
    columns = {
        "age": ColumnTable(least=0, most=100),
        "ward": ColumnTable(kind="category", values=("a", "b", "c")),
    }
    age = np.concatenate([np.full(40, 35.0), np.full(30, 55.0), [31.0, 88.0, 52.0]])
    table = DataTable({"age": age, "ward": np.repeat([0.0, 1.0, 2.0], [40, 30, 3])}, columns)
    questions = [{"ask": "describe", "columns": ["age"]}, {"ask": "histogram", "column": "age"}]
    questions += [{**each, "by": "ward"} for each in questions]
    whole, bins, parts, cells = (answer.values for answer in told(asked(columns, questions), table))
    assert whole["age"]["all"]["count"] == 73
    seen = [each["count"] for each in parts["age"].values()]
    assert seen == [40, None, None]
    assert [each["mean"] is None for each in parts["age"].values()] == [False, True, True]
    for total, *own in zip(bins["counts"]["all"], *cells["counts"].values(), strict=True):
        if total is not None and None in own:
            left = total - sum(each for each in own if each is not None)
            assert own.count(None) > 1 or left >= 5


@pytest.mark.parametrize(
    ("question", "noise", "words"),
    [
        (
            {"ask": "boosted_trees", "outcome": "kind", "max_depth": 10, "rounds": 1, "bins": 1024},
            None,
            "coordinator would keep",
        ),
        ({"ask": "correlation"}, 1.0, "make 199 terms"),
    ],
)
def test_no_survey_names_more_than_memory_holds(
    question: dict[str, Any], noise: float | None, words: str
) -> None:
    """Of few sums: histograms that are kept for later levels, and a map of products of all terms."""
    names = [f"x{place}" for place in range(199)]
    columns = {name: ColumnTable(least=0, most=1) for name in names}
    columns["kind"] = ColumnTable(kind="category", values=tuple(range(64)))
    key = "on" if "outcome" in question else "columns"
    with pytest.raises(ConfigError, match=words):
        asked(columns, [{**question, key: names}], noise=noise)


def test_a_picture_shades_bins_that_are_hidden(tmp_path: Path) -> None:
    """A line that falls to 0 there would say that nobody is."""
    figures = pytest.importorskip("matplotlib.figure", reason="pictures take the extra plot")
    columns = {"age": ColumnTable(least=0, most=100)}
    table = DataTable({"age": np.repeat([15.0, 35.0, 55.0], [2, 20, 30])}, columns)
    [answer] = told(asked(columns, [{"ask": "histogram", "column": "age"}]), table)
    axes = figures.Figure().subplots()
    survey_figures._histogram(axes, answer)
    assert "few rows: hidden" in axes.get_legend_handles_labels()[1]
