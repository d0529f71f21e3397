"""Analyses over real silos: the same bits as on local files, and what a silo refuses."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import NAMES, Federation, agents, federation_of, silo
from hypothesis import given
from hypothesis import strategies as st

from roundtable.cli.main import run as run_command
from roundtable.client.agent.silo_log import NAME
from roundtable.client.policy.analysis_rules import AnalysesTable, analysis_objections, objections_to_count
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.client.worker.earlier_readings import EarlierReadings, rows_apart
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.errors import ConfigError, IdentityError, PrivacyError, TaskError
from roundtable.core.evidence.audit_log import read_log
from roundtable.core.identity.credentials import CA_CERTIFICATE
from roundtable.core.initial_model import initial_model
from roundtable.core.tables.silo_tables import SiloTables
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.task import Site, load_task
from roundtable.operator import OperatorClient
from roundtable.simulation import simulate
from roundtable.survey_report import read_report
from roundtable.surveys import analyse, load_survey, survey_job

SURVEY = """
table = "people"
secure_aggregation = true

[columns.age]
unit = "years"
least = 0
most = 120
missing = ["?"]

[columns.ill]
kind = "category"
values = ["no", "yes"]

[[questions]]
ask = "describe"
columns = ["age"]
by = "ill"

[[questions]]
ask = "logistic"
outcome = "ill"
on = ["age"]

[[questions]]
ask = "quantiles"
column = "age"
at = [0.5]
"""


FITS = """
[columns.days]
least = 0
most = 100

[[questions]]
ask = "cox"
time = "days"
event = "ill"
every = 10
on = ["age"]
robust = true

[[questions]]
ask = "mixed_intercept"
outcome = "days"
on = ["age"]

[[questions]]
ask = "components"
columns = ["age", "days"]

[[questions]]
ask = "mann_whitney"
column = "age"
by = "ill"
every = 1

[[questions]]
ask = "top_values"
column = "age"
every = 10

[[questions]]
ask = "evaluate"
score = "age"
outcome = "ill"
by_silo = true

[[questions]]
name = "trees"
ask = "boosted_trees"
outcome = "ill"
on = ["age"]
rounds = 3
max_depth = 3
bins = 8
held_out = 0.2
"""


def write(folder: Path, asked: str = SURVEY) -> Path:
    """A survey beside the three silos' files."""
    lines = [asked, "[silos]"]
    for number, name in enumerate(NAMES):
        draw = np.random.default_rng(number)
        age = draw.integers(20, 90, 40)
        ill = np.where(draw.random(40) < age / 110, "yes", "no")
        days = draw.integers(1, 100, 40)
        rows = [
            f"{'?' if place == 7 else years},{word},{many}"
            for place, (years, word, many) in enumerate(zip(age, ill, days, strict=True))
        ]
        (folder / f"{name}.csv").write_text("\n".join(["age,ill,days", *rows]) + "\n")
        lines.append(f'{name} = "{name}.csv"')
    (folder / "survey.toml").write_text("\n".join(lines))
    return folder / "survey.toml"


def with_table(federation: Federation, name: str, **policy: Any) -> AgentConfig:
    table = {"people": {"file": f"{name}.csv", "columns": {"age": {"unit": "years"}}}}
    config = replace(silo(federation, name), tasks={"analysis": "analysis"}, data=table)
    return replace(config, policy=PolicyTable(analyses=AnalysesTable(**policy)))


def wait_for_silos(address: str, folder: Path) -> None:
    """Until all are connected."""
    with OperatorClient(address, folder / "operator") as operator:
        while sum(client.online for client in operator.clients()) < len(NAMES):
            time.sleep(0.01)


def check_report(report: Path, credentials: Path, found: dict[str, Any]) -> None:
    """A report gives the answers again, and no changed one is believed."""
    ca = (credentials / CA_CERTIFICATE).read_bytes()
    signed, told = read_report(report, ca)
    assert signed.signer == "operator"
    assert told.findings.to_dict() == found
    document = json.loads(report.read_text())
    check = ["analyse", "--check", str(report), "--credentials", str(credentials)]
    assert run_command(check) == 0
    document["statement"]["answers"][0]["values"] = {}
    report.write_text(json.dumps(document))
    assert run_command(check) == 1
    for wrong in ("", "[]", "{}", "[" * 100_000, json.dumps({**document, "statement": {}})):
        report.write_text(wrong)
        with pytest.raises(IdentityError):
            read_report(report, ca)


async def test_silos_answer_as_local_files_do_and_write_down_what_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survey = write(tmp_path)
    here = analyse(survey)
    in_the_clear = analyse(survey, overrides={"secure_aggregation": False})
    assert [answer.values for answer in here.answers] == [answer.values for answer in in_the_clear.answers]
    async with federation_of(tmp_path, "") as (address, folder):
        command = [
            "analyse",
            str(survey),
            "--coordinator",
            address,
            "--credentials",
            str(folder / "operator"),
        ]
        async with agents(*(with_table((address, folder), name) for name in NAMES)):
            await asyncio.to_thread(wait_for_silos, address, folder)
            report = tmp_path / "report.json"
            code = await asyncio.to_thread(run_command, [*command, "--json", "--report", str(report)])
            said = capsys.readouterr()
            assert code == 0, said.err
            found = json.loads(said.out)
            assert found == {**here.to_dict(), "rounds": found["rounds"]}
            await asyncio.to_thread(check_report, report, folder / "operator", found)
            capsys.readouterr()
            code = await asyncio.to_thread(
                run_command, [*command, "--set", "secure_aggregation=false", "--set", "least_count=30"]
            )
            assert code == 2
            refused = capsys.readouterr().err
            assert "a cell of this silo has fewer than 30 rows" in refused
            assert "secure_aggregation = true" in refused
    lines = (tmp_path / "state" / "alder" / NAME).read_text().splitlines()
    left = [
        entry
        for entry in read_log(lines, (tmp_path / "ca" / CA_CERTIFICATE).read_bytes(), "agent").entries
        if entry.action == "answered"
    ]
    assert [entry.detail["round"] for entry in left] == [*range(1, found["rounds"] + 1)]
    assert left[0].detail["masked"] is True
    assert [asked["ask"] for asked in left[0].detail["questions"]] == ["describe", "logistic", "quantiles"]


@pytest.mark.slow
async def test_fits_of_real_silos_are_those_of_local_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masked over a coordinator, masked here and in the clear here: the same bits of Cox regression, trees
    and all that has its own sums."""
    survey = write(tmp_path, SURVEY[: SURVEY.index("[[questions]]")] + FITS)
    with pytest.raises(PrivacyError, match="without masks the coordinator sees each silo's own sums"):
        analyse(survey, overrides={"secure_aggregation": False})
    wanted = tmp_path / "here.json"
    found = [
        analyse(survey, overrides={"secure_aggregation": masked, "least_count": 1})
        for masked in (True, False)
    ]
    found[0].save_model(wanted)
    assert [answer.why for answer in found[0].answers] == [""] * 7
    assert found[1].answers == found[0].answers
    kinds = [answer.ask for answer in found[0].answers]
    async with federation_of(tmp_path, "") as (address, folder):
        config = (
            with_table((address, folder), name, least_count=1, allowed=kinds, own_figures=True)
            for name in NAMES
        )
        model = tmp_path / "model.json"
        command = ["analyse", str(survey), "--set", "least_count=1", "--model", str(model), "--json"]
        command += ["--coordinator", address, "--credentials", str(folder / "operator")]
        async with agents(*config):
            await asyncio.to_thread(wait_for_silos, address, folder)
            code = await asyncio.to_thread(run_command, command)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["answers"] == found[0].to_dict()["answers"]
    assert model.read_bytes() == wanted.read_bytes()
    assert len(json.loads(model.read_bytes())["learner"]["gradient_booster"]["model"]["trees"]) == 3


_NOISY = {"histogram", "top_values", "t_test"}


def test_what_a_silo_objects_to(tmp_path: Path) -> None:
    job = survey_job(load_survey(write(tmp_path)), 3)

    def said(**rules: Any) -> list[str]:
        return list(analysis_objections(AnalysesTable(**rules), job))

    assert said() == []
    assert "of no fewer than 10" in said(least_count=10)[0]
    assert "of 1, and this silo of 5 ([policy.analyses] round_to): set round_to = 5" in said(round_to=5)[0]
    asked = {"ask": "histogram", "column": "age", "bins": 4}
    for multiple, objections in ((5, 0), (10, 0), (7, 1)):
        given = {"questions": [asked], "round_to": multiple}
        rounded = survey_job(load_survey(write(tmp_path), given), 3)
        assert len(list(analysis_objections(AnalysesTable(round_to=5), rounded))) == objections
    assert "'people' may not be asked" in said(tables=["others"])[0]
    assert "of the kind logistic, quantiles are not answered" in said(allowed=["describe"])[0]
    assert ["'ill' may be neither" in line for line in said(protected=["ill"])] == [True, True]
    assert said(protected=["age"]) == []
    for kept in (
        {"ask": "histogram", "column": "age"},
        {"ask": "top_values", "column": "age", "every": 1},
        {"ask": "t_test", "column": "age", "by": "ill"},
        {"ask": "anova", "column": "age", "by": "ill"},
        {"ask": "mann_whitney", "column": "age", "by": "ill", "every": 1},
    ):
        for privacy in ({}, {"privacy": {"epsilon": 1.0}}) if kept["ask"] in _NOISY else ({},):
            telling = survey_job(load_survey(write(tmp_path), {"questions": [kept], **privacy}), 3)
            [line] = analysis_objections(AnalysesTable(protected=["age"], least_count=5), telling)
            assert "'age' may be neither an outcome nor a group here" in line
    asked = {"ask": "meta_analysis", "outcome": "ill", "on": ["age"]}
    meta = survey_job(load_survey(write(tmp_path), {"questions": [asked]}), 3)
    assert "tell of this silo's own estimates" in next(analysis_objections(AnalysesTable(), meta))
    assert list(analysis_objections(AnalysesTable(allowed=["meta_analysis"]), meta)) == []
    asked = {"ask": "evaluate", "score": "age", "outcome": "ill", "by_silo": True}
    each = survey_job(load_survey(write(tmp_path), {"questions": [asked]}), 3)
    assert "shows figures of this silo's own rows" in next(analysis_objections(AnalysesTable(), each))
    assert list(analysis_objections(AnalysesTable(own_figures=True), each)) == []
    begun = [(1000.0, job), (2000.0, job)]
    assert list(objections_to_count(AnalysesTable(a_day=2), job, begun, 87399.0)) != []
    assert list(objections_to_count(AnalysesTable(a_day=2), job, begun, 87401.0)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing = []", "column 'age', row 8: not a finite number"),
        ("missing = ['?']\nunit = 'months'", "column 'age' is in 'months' here and in 'years' in the study"),
        ("missing = ['?']\nleast = 60", "column 'age' is not between 60 and"),
        ("kind = 'category'\nvalues = [1, 2]", "column 'age' is a category here and a number in the study"),
    ],
)
def test_a_silo_whose_table_is_not_the_studys_says_in_what_it_differs(
    tmp_path: Path, change: str, message: str
) -> None:
    survey = write(tmp_path)
    text = survey.read_text().replace('missing = ["?"]\n', "")
    table = f"cedar = {{ file = 'cedar.csv', columns = {{ age = {{ {change.replace(chr(10), ', ')} }} }} }}"
    others = ", columns = { age = { missing = ['?'] } } }"
    text = text.replace('cedar = "cedar.csv"', table)
    for name in ("alder", "birch"):
        text = text.replace(f'{name} = "{name}.csv"', f"{name} = {{ file = '{name}.csv'{others}")
    survey.write_text(text)
    with pytest.raises(Exception, match=message) as raised:
        analyse(survey)
    assert "cedar" in str(raised.value)


def test_a_task_trains_on_the_same_table(tmp_path: Path) -> None:
    write(tmp_path)
    columns = {"age": {"missing": ["?"]}, "ill": {"kind": "category", "values": ["no", "yes"]}}
    site = Site("alder", options={"people": {"file": str(tmp_path / "alder.csv"), "columns": columns}})
    table = site.table("people")
    assert table.matrix(["age", "ill"]).shape == (40, 2)
    assert np.flatnonzero(np.isnan(table.column("age"))).tolist() == [7]
    with pytest.raises(TaskError, match="no table 'others'"):
        site.table("others")
    assert list(SiloTables({"path": "/srv/scans", **site.options})) == ["people"]


def test_a_table_comes_out_of_a_database(tmp_path: Path) -> None:
    sql = pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path / 'silo.db'}"
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sql.text("CREATE TABLE people (age REAL, ill TEXT)"))
        connection.execute(sql.text("INSERT INTO people VALUES (50.5, 'no'), (NULL, 'yes')"))
    engine.dispose()
    columns = {"age": {}, "ill": {"kind": "category", "values": ["no", "yes"]}}
    described = {"url": url, "query": "SELECT age, ill FROM people", "columns": columns}
    table = Site("alder", options={"people": described}).table("people")
    assert np.array_equal(table.matrix(["age", "ill"]), [[50.5, 0], [np.nan, 1]], equal_nan=True)
    wrong = Site("alder", options={"people": {**described, "query": "SELECT secret FROM nowhere"}})
    with pytest.raises(TaskError, match="did not answer the query") as raised:
        wrong.table("people")
    assert "secret" not in str(raised.value)


def test_a_table_comes_out_of_a_parquet_file(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "people.parquet"
    parquet.write_table(arrow.table({"age": [50.5, None], "ill": [True, False]}), file)
    columns = {"age": {}, "ill": {"kind": "category", "values": [0, 1]}}
    table = Site("alder", options={"people": {"file": str(file), "columns": columns}}).table("people")
    assert np.array_equal(table.matrix(["age", "ill"]), [[50.5, 1], [np.nan, 0]], equal_nan=True)


@pytest.mark.parametrize("backend", ["processes", "vectorised", "stacked"])
def test_other_backends_give_the_same_bits(tmp_path: Path, backend: str) -> None:
    survey = load_survey(write(tmp_path), {"secure_aggregation": False})
    job = survey_job(survey, 3)
    plain = simulate(job, progress=False)
    other = {"simulation.backend": backend, "simulation.workers": 2}
    assert torch.equal(simulate(job, overrides=other, progress=False).model.vector, plain.model.vector)


@pytest.mark.parametrize(
    "change",
    [
        {"aggregation.rule": "median"},
        {"aggregation.validation.norm_ratio": 100.0},
        {"aggregation.weighting": "examples"},
        {"cohort.minimum": 2},
        {"transfer.up": "float16"},
        {"evaluation.every": 1},
        {"privacy": {"level": "client", "clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}},
        {"task": "analysis", "simulation.clients": 4},
    ],
    ids=str,
)
def test_what_would_change_a_sum_is_refused_before_round_1(tmp_path: Path, change: dict[str, Any]) -> None:
    job = survey_job(load_survey(write(tmp_path), {"secure_aggregation": False}), 3)
    with pytest.raises((ConfigError, PrivacyError)):
        simulate(job, overrides=change, progress=False)


def test_a_silo_answers_no_round_of_an_analysis_that_it_did_not_begin_or_whose_rows_have_changed(
    tmp_path: Path,
) -> None:
    job = survey_job(load_survey(write(tmp_path), {"secure_aggregation": False}), 3)
    algorithm = make_algorithm(job.algorithm)
    model = initial_model(job, load_task("analysis"), algorithm)
    first = simulate(job, overrides={"rounds": 1}, progress=False).model.vector
    data = Site("alder", options=job.simulation.data).tables

    def answered(vector: torch.Tensor, kept: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        work = LocalWork(job, model.layout, vector, 2, "alder", kept, algorithm)
        return train(load_task("analysis"), {}, data, work).local

    kept = answered(model.vector, None)
    assert answered(first, kept).keys() == kept.keys()
    with pytest.raises(PrivacyError, match="did not begin the analysis"):
        answered(first, None)
    (tmp_path / "alder.csv").write_text((tmp_path / "alder.csv").read_text() + "44,no,9\n" * 5)
    data = Site("alder", options=job.simulation.data).tables
    with pytest.raises(PrivacyError, match="table is another than when the analysis began"):
        answered(first, kept)


def test_readings_that_differ_in_few_rows_are_no_two_analyses(tmp_path: Path) -> None:
    """A changed row, a missing code, recoding: each would tell of the rows in which the readings differ."""
    write(tmp_path)
    file = tmp_path / "alder.csv"
    file.write_text("age,ill\n" + "50,no\n" * 20 + "51,yes\n" * 20 + "77,no\n" * 3)
    plain = {
        "age": ColumnTable(least=0, most=120),
        "ill": ColumnTable(kind="category", values=("no", "yes")),
    }

    def read(**columns: ColumnTable) -> None:
        table = Site("alder", options={"people": {"file": str(file)}}).tables.read(
            "people", {**plain, **columns}
        )
        EarlierReadings(tmp_path / "readings").compare("people", table, 5)

    read()
    read(ill=ColumnTable(kind="category", values=("yes", "no")))
    read(age=ColumnTable(missing=("51",)))
    for change in (ColumnTable(missing=("77",)), ColumnTable(recode={"77": 50})):
        with pytest.raises(PrivacyError, match="column 'age' of table 'people' differs in fewer than 5 rows"):
            read(age=change)
    rows = file.read_text()
    file.write_text("age,ill\n" + "".join(reversed(rows.splitlines(keepends=True)[1:])))
    read()
    file.write_text(rows.replace("50,no", "50,yes", 1))
    with pytest.raises(PrivacyError, match="column 'ill'"):
        read()
    file.write_text(rows + "52,no\n" * 4)
    with pytest.raises(PrivacyError, match="earlier analysis read"):
        read()
    file.write_text(rows + "52,no\n" * 5)
    read()


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_rows_apart_are_those_that_no_pairing_matches(one: list[int], other: list[int]) -> None:
    common = (Counter(one) & Counter(other)).total()
    words = [np.sort(np.array(each, np.uint64)) for each in (one, other)]
    assert rows_apart(*words) == max(len(one), len(other)) - common


def test_a_question_that_cannot_be_asked_is_refused_before_anybody_is(tmp_path: Path) -> None:
    survey = load_survey(write(tmp_path))
    with pytest.raises(ConfigError, match="at least 3 silos"):
        survey_job(survey, 2)
    with pytest.raises(ConfigError, match=r"no least and most.*\[columns\.age\]"):
        survey_job(load_survey(tmp_path / "survey.toml", {"columns.age": {"kind": "number"}}), 3)


def test_what_every_silo_objects_to_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survey = write(tmp_path)
    survey.write_text(survey.read_text().replace("most = 120", "most = 60"))
    assert run_command(["analyse", str(survey)]) == 2
    said = capsys.readouterr().err
    assert "column 'age' is not between 0 and 60" in said
    assert "Traceback" not in said


def test_answers_are_shown_also_where_a_file_of_them_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["analyse", str(write(tmp_path)), "--model", str(tmp_path / "trees.json")]) == 2
    told = capsys.readouterr()
    assert "question 1 (describe)" in told.out
    assert "answers of boosted_trees have" in told.err
