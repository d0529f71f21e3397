"""Words of a study that would be commands: in its tables, files and pictures, and in a report of somebody."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest

from roundtable.cli.main import run
from roundtable.core.analyses.question import Answer
from roundtable.core.errors import ConfigError, IdentityError, TaskError
from roundtable.core.foreign_text import spreadsheet_cell
from roundtable.core.identity.credentials import CA_CERTIFICATE, create_ca, issue, load_silo_identity
from roundtable.survey_figures import draw
from roundtable.survey_report import read_report, write_report
from roundtable.surveys import SurveyAnswers, analyse, load_survey

WORDS = (
    '=HYPERLINK("http://example.org")',
    "@SUM(1)",
    "+1+1",
    "-2+3",
    "\uff1d1+1",
    "$0 to $50",
    "$\\frac{$",
    "_under",
    "\x1b[31mred",
    "\u202eevil",
    "two\nlines",
    "\ttab",
    "<script>alert(1)</script>--",
    "{0.__class__} %s",
    "../../etc/passwd",
)


def survey(folder: Path) -> Path:
    """A survey whose columns, values and titles are such words."""
    values = json.dumps(["plain", *WORDS])
    lines = ['table = "people"', "[columns.age]", "least = 0", "most = 100"]
    lines += ["[columns.group]", 'kind = "category"', f"values = {values}"]
    for word in WORDS[:2]:
        lines += [
            "[[questions]]",
            f"name = {json.dumps(word)}",
            'ask = "histogram"',
            'column = "age"',
            'by = "group"',
        ]
    lines.append("[silos]")
    for silo in range(3):
        ages = np.random.default_rng(silo).integers(20, 80, 10 * (len(WORDS) + 1))
        with (folder / f"{silo}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["age", "group"])
            writer.writerows(zip(ages, ["plain", *WORDS] * 10, strict=True))
        lines.append(f'silo{silo} = "{silo}.csv"')
    (folder / "survey.toml").write_text("\n".join(lines))
    return folder / "survey.toml"


def test_words_of_a_study_command_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, drawn = tmp_path / "found.csv", tmp_path / "found.svg"
    assert run(["analyse", str(survey(tmp_path)), "--csv", str(made), "--figure", str(drawn)]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    text = made.read_text()
    assert text.replace("\n", "").isprintable()
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\uff1d"))]
    assert {"'@SUM(1)", "two\\nlines", "$0 to $50"} <= {*cells}
    picture = minidom.parse(str(drawn))
    comments = {
        node.data.strip()
        for parent in picture.getElementsByTagName("g")
        for node in parent.childNodes
        if node.nodeType == 8
    }
    assert {"$0 to $50", "_under", "two\\nlines"} <= comments, "drawn as written, the legend's too"


@pytest.mark.parametrize(
    ("value", "cell"),
    [(-2.5, -2.5), ("-1", "-1"), ("-1e3", "-1e3"), ("-x", "'-x"), (None, None), ("a=b", "a=b")],
)
def test_numbers_are_no_formulas(value: object, cell: object) -> None:
    assert spreadsheet_cell(value) == cell


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ('ask = "decribe"', "survey.toml:8: questions.1.ask: choose one of describe, "),
        ('ask = "describe"', "survey.toml:7: questions.1.columns: missing"),
        ('ask = "anova"\nbins = 5', "survey.toml:9: questions.1.bins: belongs to ask = 'histogram' or "),
    ],
)
def test_a_mistake_in_a_question_is_told_where_it_stands(tmp_path: Path, question: str, message: str) -> None:
    first = 'table = "people"\n[columns.age]\n[[questions]]\nask = "describe"\ncolumns = ["age"]\n\n'
    (tmp_path / "survey.toml").write_text(f"{first}[[questions]]\n{question}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_survey(tmp_path / "survey.toml")


def test_silos_that_all_fail_are_told_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "survey.toml").write_text(
        'table = "people"\n[columns.age]\nleast = 0\nmost = 9\n[[questions]]\nask = "describe"\n'
        'columns = ["age"]\n[silos]\nalder = "no.csv"\nbirch = "no.csv"\ncedar = "no.csv"\n'
    )
    with pytest.raises(
        TaskError, match=r"^nothing was added up: the analysis fails at each of the 3 .* alder: "
    ):
        analyse(tmp_path / "survey.toml")


def test_values_that_make_no_picture_are_an_error_without_a_traceback(tmp_path: Path) -> None:
    for values in ({}, {"edges": 1, "counts": {}}, {"edges": [0, 1], "counts": {"a": [1, 2, 3]}}):
        with pytest.raises(ConfigError, match="make no picture"):
            draw([Answer("ages", "histogram", values=values)], tmp_path / "p.svg")


def test_a_report_that_says_no_cost_is_none(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "olga", "operator", tmp_path / "olga")
    identity = load_silo_identity(tmp_path / "olga")
    ca = (tmp_path / "olga" / CA_CERTIFICATE).read_bytes()
    for privacy in ({}, {"epsilon": "\x1b[31m1", "delta": 1e-6}):
        found = SurveyAnswers("people", [Answer("ages", "describe")], 3, 1, True, 5, privacy)
        write_report(tmp_path / "report.json", found, identity, "job", "{}")
        with pytest.raises(IdentityError, match="no report"):
            read_report(tmp_path / "report.json", ca)
