"""Analyses of one's own: the pooled figures out of declared sums, under the same disclosure control."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import NAMES, Federation, agents, federation_of, silo
from scipy import stats

from roundtable.cli.main import run as run_command
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import TaskTable
from roundtable.core.analyses.own_question import OwnForm, OwnQuestion, OwnSum
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.plugins.code_hash import hash_of_code
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.operator import OperatorClient
from roundtable.surveys import analyse, load_survey, survey_job

SURVEY = """
table = "people"
code = "skewness.py:Skewness"
parameters = { column = "age", by = "kind" }
columns.age = { least = 0, most = 120 }
columns.kind = { kind = "category", values = ["a", "b", "rare", "c"] }
questions = [{ ask = "own", name = "ages" }, { ask = "describe", columns = ["age"] }]
"""


@pytest.fixture
def survey(tmp_path: Path, root: Path) -> Path:
    """A survey beside its code and three silos' files, in which one kind is rare."""
    shutil.copy(root / "examples" / "heart" / "skewness.py", tmp_path)
    for number, name in enumerate(NAMES):
        draw = np.random.default_rng(number)
        lines = [f"{age},{kind}" for age, kind in zip(draw.integers(20, 90, 60), "abc" * 20, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,kind", "50,rare", *lines]) + "\n")
    files = "".join(f'{name} = "{name}.csv"\n' for name in NAMES)
    (tmp_path / "survey.toml").write_text(f"{SURVEY}[silos]\n{files}")
    return tmp_path / "survey.toml"


def pooled(folder: Path, kind: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    lines = [line.split(",") for name in NAMES for line in (folder / f"{name}.csv").read_text().split()]
    return np.array([float(age) for age, own in lines if own == kind])


def with_code(federation: Federation, name: str, digest: str) -> AgentConfig:
    """A silo that offers the analysis, and has read the code of this digest."""
    table = TaskTable(use="skewness.py:Skewness", blake3=digest, parameters=["column", "by"])
    data = {"people": {"file": f"{name}.csv"}}
    config = replace(silo(federation, name), tasks={"skewness": table.use}, data=data)
    return replace(config, task_tables={"skewness": table})


def ask_silos(address: str, folder: Path, survey: Path) -> int:
    credentials = folder / "operator"
    with OperatorClient(address, credentials) as operator:
        while sum(client.online for client in operator.clients()) < len(NAMES):
            pass
    command = ["analyse", str(survey), "--coordinator", address, "--credentials", str(credentials), "--json"]
    return run_command(command)


async def test_figures_are_the_pooled_ones_here_and_at_silos_that_have_read_the_code(
    survey: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = analyse(survey)
    rows = {row["kind"]: row for row in here["ages"]["rows"]}
    for kind in "abc":
        ages = pooled(survey.parent, kind)
        assert (rows[kind]["rows"] is None) == (kind == "a")  # The smallest line's cell beside the rare one.
        if kind != "a":
            assert rows[kind]["skewness"] == pytest.approx(stats.skew(ages), rel=1e-12)
            assert rows[kind]["kurtosis"] == pytest.approx(stats.kurtosis(ages), rel=1e-12)
    assert rows["rare"]["rows"] is rows["rare"]["skewness"] is None
    assert here.answers[0].hidden == 2
    digest = hash_of_code("task", "skewness.py:Skewness", "roundtable.tasks", survey.parent)
    async with federation_of(survey.parent, "") as (address, folder):
        other = with_code((address, folder), "cedar", "0" * 64)
        job = survey_job(load_survey(survey), 3)
        (refused,) = other.rules().objections(job, None, datetime.now())
        assert "is not the one that was allowed" in refused
        async with agents(*(with_code((address, folder), name, digest) for name in NAMES)):
            code = await asyncio.to_thread(ask_silos, address, folder, survey)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["answers"] == here.to_dict()["answers"]


def test_masked_and_in_the_clear_it_is_the_same_bits(survey: Path) -> None:
    masked, plain = (
        analyse(survey, overrides={"secure_aggregation": how, "least_count": 1}) for how in (True, False)
    )
    assert plain.answers == masked.answers


class Sneaky:
    """Gives what it likes."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self.made = made

    def form(self, columns: Any) -> OwnForm:
        return FORM

    def count(self, table: DataTable) -> Mapping[str, Any]:
        return self.made

    def add_up(self, table: DataTable, known: Any, round: int) -> Mapping[str, Any]:
        assert np.isnan(known["rows"]).tolist() == [False, True]
        return self.made


FORM = OwnForm(reads=("age",), counts={"rows": (2,)}, sums={"ages": OwnSum(of="rows", round=2, shape=(2,))})
TABLE = DataTable({"age": np.arange(9.0)}, {})


def of(made: Mapping[str, Any], stage: int) -> dict[str, Any]:
    public = {"stage": np.array([stage]), "rows": np.array([8.0, -1.0]), "ages": np.zeros((2, 2))}
    question = OwnQuestion({"age": ColumnTable()}, 5, "ages", FORM)
    return question.run_by(Sneaky(made)).sums(TABLE, public, stage)


def test_code_sends_no_more_than_it_has_stated() -> None:
    assert of({"rows": [8, 1]}, 0)["rows"].tolist() == [8, 1]
    assert of({"ages": [[1.0, 2.0], [3.0, 4.0]]}, 1)["ages"].tolist() == [[1, 2], [0, 0]]
    for made, message in (
        ({"rows": [8, 1], "more": [1]}, "gives more, rows where rows are asked"),
        ({"rows": [8, 1, 0]}, r"in the shape \[3\], and \[2\] is stated"),
        ({"rows": [8.5, 0]}, "no numbers of rows"),
        ({"rows": [-1, 0]}, "no numbers of rows"),
        ({"rows": [10, 0]}, "no numbers of rows"),
        ({"rows": [float("nan"), 0]}, "not finite"),
    ):
        with pytest.raises(TaskError, match=message):
            of(made, 0)
    with pytest.raises(TaskError, match="another version of the code"):
        OwnQuestion({"age": ColumnTable()}, 5, "ages", OwnForm(reads=("age",), counts={"rows": (3,)})).run_by(
            Sneaky({})
        ).sums(TABLE, {}, 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"code": "skewness.py:Nothing"}, "has no 'Nothing'"),
        ({"parameters": {"column": "age"}}, "by"),
        ({"parameters": {"column": "weight", "by": "kind"}}, "no column 'weight'"),
        ({"questions": [{"ask": "describe", "columns": ["age"]}]}, 'answers one question, ask = "own"'),
        ({"questions": [{"ask": "own", "form": {"counts": {"rows": [2]}}}]}, "something else than"),
    ],
)
def test_what_a_survey_cannot_ask(survey: Path, overrides: Mapping[str, Any], message: str) -> None:
    with pytest.raises(RoundtableError, match=message):
        analyse(survey, overrides=overrides)


def test_a_question_without_code_is_refused(survey: Path) -> None:
    survey.write_text(
        survey.read_text().replace('code = "skewness.py:Skewness"', "").replace("parameters", "#")
    )
    with pytest.raises(ConfigError, match=r'name it as code = "file\.py:Class"'):
        analyse(survey)
    for wrong, message in (
        ({"sums": {"ages": {"of": "people"}}}, "which is no count"),
        ({"sums": {"ages": {"of": "rows", "round": 3}}}, "no sum is asked in round 2"),
        ({"told": ["sex"]}, "which it does not read"),
    ):
        with pytest.raises(ValueError, match=message):
            OwnForm.model_validate({"counts": {"rows": [2]}, **wrong})
