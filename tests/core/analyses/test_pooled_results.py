"""Every answer equals that of the pooled library, within 1e-8 of the larger of the value and its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from sklearn.datasets import load_breast_cancer, load_diabetes

from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable, DataTableTable
from roundtable.core.tables.table_reading import DataTable, read_columns

CASES = json.loads((Path(__file__).parent / "pooled_results.json").read_text())["cases"]
ROOT = Path(__file__).parents[3]
HEART = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num".split()  # noqa: SIM905
Frame = dict[str, np.ndarray]


@cache
def pooled(name: str) -> Frame:
    """A data set as columns of doubles."""
    if name == "ties":
        r = np.arange(40)
        made = {"time": 1 + 7 * r % 9, "event": 5 * r % 7 != 0, "g": r % 2}
        return {key: value.astype(float) for key, value in made.items()}
    if name == "heart":
        parts = []
        for number, hospital in enumerate(("cleveland", "hungarian", "switzerland", "va")):
            file = ROOT / "examples" / "heart" / "data" / f"processed.{hospital}.data"
            columns = {key: ColumnTable(missing=("?",)) for key in HEART}
            table = read_columns(DataTableTable(file=str(file), header=tuple(HEART)), columns)
            parts.append({**table.columns, "file": np.full(len(table), float(number))})
        frame = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        return {**frame, "disease": (frame["num"] > 0) * 1.0}
    if name == "diabetes":
        loaded = load_diabetes(scaled=False)
        return {**dict(zip(loaded.feature_names, loaded.data.T, strict=True)), "y": loaded.target}
    loaded = load_breast_cancer()
    names = [str(each).replace(" ", "_") for each in loaded.feature_names]
    return {**dict(zip(names, loaded.data.T, strict=True)), "benign": loaded.target.astype(float)}


def silos_of(data: Mapping[str, Any]) -> list[Frame]:
    """The rows of each silo."""
    if "inline" in data:
        return [
            {
                name: np.array([np.nan if v is None else v for v in values], float)
                for name, values in silo.items()
            }
            for silo in data["inline"].values()
        ]
    frame, split = pooled(data["name"]), data["split"]
    rows = len(next(iter(frame.values())))
    if "row_mod" in split:
        owner = np.arange(rows) % split["row_mod"]
    elif "blocks" in split:
        owner = np.repeat(np.arange(len(split["blocks"])), split["blocks"])
    else:
        owner = frame[split["column"]]
    return [{key: values[owner == each] for key, values in frame.items()} for each in np.unique(owner)]


def ask(
    silos: list[Frame],
    question: dict[str, Any],
    categories: tuple[str, ...] = (),
    *,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    least_count: int = 1,
) -> Answer:
    """The answer to one question, with every vector on its way as a float32 update's mean."""
    names = {*question.get("on", ()), *_listed(question)}
    columns, tables = {}, [dict[str, np.ndarray]() for _ in silos]
    for name in sorted(names):
        values = np.concatenate([silo[name] for silo in silos])
        values = values[~np.isnan(values)]
        if name in categories:
            kinds = np.unique(values)
            columns[name] = ColumnTable(kind="category", values=tuple(float(kind) for kind in kinds))
        else:
            least = 0.0 if question["ask"] == "survival" else float(values.min())
            span = (ranges or {}).get(name, (least, float(max(values.max(), least + 1))))
            columns[name] = ColumnTable(least=span[0], most=span[1])
        for table, silo in zip(tables, silos, strict=True):
            own = silo[name]
            table[name] = (
                np.where(np.isnan(own), np.nan, np.searchsorted(kinds, own)) if name in categories else own
            )
    survey = Survey.of(columns, [TypeAdapter(AnyQuestion).validate_python(question)], least_count)
    parts = [DataTable(table, columns) for table in tables]
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    for _ in range(survey.rounds):
        down = survey.public_places.unpack(survey.public_places.pack(public))
        rows = [survey.sum_places.encode(survey.sums(part, down)) for part in parts]
        mean = torch.stack(rows).double().mean(dim=0).float()
        public = survey.step(down, survey.sum_places.decode(mean, len(parts)))
        if not survey.open(public):
            break
    return survey.answers(public)[0]


def _listed(question: Mapping[str, Any]) -> list[str]:
    keys = ("columns", "column", "by", "rows", "outcome", "time", "event", "exposure", "score", "weights")
    found = [question[key] for key in keys if question.get(key) is not None]
    return [name for each in found for name in ([each] if isinstance(each, str) else each)]


def close(found: Any, wanted: Any, errors: Any = 0.0) -> None:
    """Within 1e-8 of the larger of the value, the error, and the least that counts in an array."""
    one, two = np.asarray(found, float), np.asarray(wanted, float)
    assert one.shape == two.shape
    scale = np.maximum(np.maximum(np.abs(two), errors), 0.1 * np.abs(two).max(initial=0.0))
    assert (np.abs(one - two) <= 1e-8 * scale).all(), (one, two)


def describe(case: Mapping[str, Any], silos: list[Frame]) -> None:
    found = ask(silos, {"ask": "describe", "columns": case["params"]["columns"]}).values
    for name, wanted in case["expected"].items():
        own = found[name]["all"]
        assert (own["count"], own["missing"]) == (wanted["count"], wanted["missing"])
        close([own["mean"]], [wanted["mean"]])
        close([own["variance"], own["sd"]], [wanted["var"], wanted["std"]])


def group_by(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params = case["params"]
    asked = {"ask": "describe", "columns": [params["column"]], "by": params["by"]}
    found = ask(silos, asked, (params["by"],)).values[params["column"]]
    for label, wanted in case["expected"].items():
        assert found[label]["count"] == wanted["count"]
        close([found[label]["mean"], found[label]["sd"]], [wanted["mean"], wanted["std"]])


def covariance(case: Mapping[str, Any], silos: list[Frame]) -> None:
    found = ask(silos, {"ask": "correlation", "columns": case["params"]["columns"]}).values
    assert found["n"] == case["expected"]["n"]
    for mine, theirs in (("covariance", "cov"), ("correlation", "corr")):
        wanted = np.array(case["expected"][theirs])
        spread = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
        close(np.array(found[mine]) / spread, wanted / spread)


def quantiles(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params = case["params"]
    asked = {"ask": "quantiles", "column": params["column"], "at": params["q"], "method": params["method"]}
    found = ask(silos, asked).values["quantiles"]
    close([each["value"] for each in found], case["expected"])
    assert {each["within"] for each in found} == {0.0}


def histogram(case: Mapping[str, Any], silos: list[Frame]) -> None:
    edges = case["params"]["edges"]
    found = ask(
        silos, {"ask": "histogram", "column": case["params"]["column"], "bins": len(edges) - 1}
    ).values
    assert found["edges"] == edges
    assert found["counts"]["all"] == case["expected"]["counts"]


def contingency(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params, wanted = case["params"], case["expected"]
    asked = {"ask": "table", **params}
    found = ask(silos, asked, (params["rows"], params["columns"])).values
    assert found["counts"] == wanted["table"]
    assert found["df"] == wanted["dof"]
    close([found["chi2"]], [wanted["chi2"]])
    close([found["p"]], [wanted["p"]])


def t_test(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params, wanted = case["params"], case["expected"]
    asked = {"ask": "t_test", "column": params["column"], "by": params["by"]}
    found = ask(silos, asked, (params["by"],)).values
    own = found["student" if params["equal_var"] else "welch"]
    for mine, theirs in (
        (own["t"], "t"),
        (own["df"], "df"),
        (own["p"], "p"),
        (found["difference"], "difference"),
    ):
        close([mine], [wanted[theirs]])
    close(own["interval"], wanted["ci"])


def anova(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params = case["params"]
    found = ask(silos, {"ask": "anova", **params}, (params["by"],)).values
    for name in ("F", "p"):
        close([found[name]], [case["expected"][name]])


def regression(kind: str, case: Mapping[str, Any], silos: list[Frame]) -> None:
    params, wanted = case["params"], case["expected"]
    categories = (params["outcome"],) if kind == "logistic" else ()
    asked = {"ask": kind, "outcome": params["outcome"], "on": params["columns"]}
    found = ask(silos, asked, categories).values
    assert found["n"] == wanted["n"]
    errors = np.array(wanted["bse"])
    assert (
        np.abs(np.array(found["coefficients"]) - wanted["params"])
        <= 1e-8 * np.maximum(errors, np.abs(wanted["params"]))
    ).all()
    assert np.allclose(found["errors"], errors, rtol=1e-8, atol=0)
    assert np.allclose(found["p"], wanted["p"], rtol=1e-7, atol=1e-300)
    close(found["intervals"], wanted["ci"], errors[:, None])
    same = {"aic": "aic", "bic": "bic", "llf": "log_likelihood", "llnull": "log_likelihood_null"}
    same |= {"rsquared": "r_squared", "rsquared_adj": "r_squared_adjusted", "fvalue": "F", "scale": "scale"}
    for theirs, mine in same.items():
        if theirs in wanted:
            close([found[mine]], [wanted[theirs]])


def kaplan_meier(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params, wanted = case["params"], case["expected"]
    asked = {"ask": "survival", "time": params["time"], "event": params["event"], "every": 1.0}
    found = ask(silos, asked, (params["event"],)).values["curves"]["all"]
    for name in ("times", "at_risk", "events", "median"):
        assert found[name] == wanted[name]
    for name in ("survival", "lower", "upper"):
        close(found[name], wanted[name])


def log_rank(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params = case["params"]
    asked = {
        "ask": "survival",
        "time": params["time"],
        "event": params["event"],
        "every": 1.0,
        "by": params["group"],
    }
    found = ask(silos, asked, (params["event"], params["group"])).values["log_rank"]
    for name in ("chi2", "p"):
        close([found[name]], [case["expected"][name]])


def bad_input(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params, wanted = case["params"], case["expected"]
    if params["analysis"] == "kaplan_meier":
        silos = [*silos, {"time": np.array([9.0]), "event": np.array([np.nan])}]
        columns = {"time": ColumnTable(least=0, most=9), "event": ColumnTable(kind="category", values=(0, 1))}
        survey = Survey.of(
            columns,
            [
                TypeAdapter(AnyQuestion).validate_python(
                    {"ask": "survival", "time": "time", "event": "event", "every": 1.0}
                )
            ],
            1,
        )
        public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
        sums = [survey.sums(DataTable(silo, columns), public) for silo in silos]
        added = {name: sum(each[name] for each in sums) for name in sums[0]}
        curve = survey.answers(survey.step(public, added))[0].values["curves"]["all"]
        assert (curve["survival"], curve["median"], set(curve["quartiles"])) == ([], None, {1.0})
        return
    kind = {"ols": "linear"}.get(params["analysis"], params["analysis"])
    # As many rows as a fit may be of: whole copies change no estimate, and nothing of what is wrong.
    silos = [{name: np.tile(values, 3) for name, values in silo.items()} for silo in silos]
    found = ask(
        silos,
        {"ask": kind, "outcome": params["outcome"], "on": params["columns"]},
        (params["outcome"],) if kind == "logistic" else (),
    )
    reasons = {"separation": "separation", "singular": "singular", "constant": "singular"}
    expected = next((word for key, word in reasons.items() if key in str(wanted["error"])), "")
    assert expected in found.why
    if wanted["error"] is None:
        close(found.values["coefficients"], wanted["params"])
    else:
        assert found.why
        assert f"'{params['columns'][-1]}'" in found.why


CHECKS: dict[str, Callable[[Mapping[str, Any], list[Frame]], None]] = {
    "describe": describe,
    "group_by": group_by,
    "covariance": covariance,
    "quantiles": quantiles,
    "histogram": histogram,
    "contingency": contingency,
    "t_test": t_test,
    "anova": anova,
    "ols": lambda case, silos: regression("linear", case, silos),
    "logistic": lambda case, silos: regression("logistic", case, silos),
    "kaplan_meier": kaplan_meier,
    "log_rank": log_rank,
    "bad_input": bad_input,
}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_an_answer_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    CHECKS[case["analysis"]](case, silos_of(case["data"]))
