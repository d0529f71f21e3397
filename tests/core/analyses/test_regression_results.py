"""Regressions of counts, and with penalties, equal the pooled libraries', and say what is wrong with data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from scipy import optimize

from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.errors import ConfigError, TaskError
from tests.core.analyses.test_pooled_results import Frame, ask, close, silos_of

CASES = json.loads((Path(__file__).parent / "regression_results.json").read_text())["cases"]
COUNTS = ("poisson", "negative_binomial")
_ROWS = np.arange(60.0)


def _of(*kinds: str) -> Any:
    cases = [case for case in CASES if case["analysis"] in kinds]
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


@_of(*COUNTS)
def test_a_regression_of_counts_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    asked = {key: value for key, value in case["params"].items() if value is not None}
    found = ask(silos_of(case["data"]), {"ask": case["analysis"], **asked}).values
    wanted = dict(case["expected"])
    assert found["n"] == wanted.pop("n")
    errors = np.array(wanted["errors"])
    close(found["coefficients"], wanted.pop("coefficients"), errors)
    close(found["intervals"], wanted.pop("intervals"), errors[:, None])
    assert np.allclose(found["p"], wanted.pop("p"), rtol=1e-7, atol=1e-300)
    for name, value in wanted.items():
        close(found[name], value)


@_of("linear")
def test_a_weighted_regression_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    silos = silos_of(case["data"])
    found = ask(silos, {"ask": "linear", **case["params"]}).values
    errors = np.array(case["expected"]["errors"])
    for name, value in case["expected"].items():
        size = {"coefficients": errors, "intervals": errors[:, None]}.get(name, 0.0)
        close(found[name], value, size)
    doubled = [{**silo, "trestbps": 2 * silo["trestbps"]} for silo in silos]
    again = ask(doubled, {"ask": "linear", **case["params"]}).values
    close(again["errors"], errors)


def test_weights_that_make_few_rows_count_for_all_have_no_answer() -> None:
    frame = {"y": _ROWS % 7, "x": _ROWS % 5, "w": np.where(_ROWS < 9, 1.0, 1e-6)}
    asked = {"ask": "linear", "outcome": "y", "on": ["x"], "weights": "w"}
    assert ask(_thirds(frame), asked, least_count=5).why == ""
    assert "fewer rows than the least count" in ask(_thirds(frame), asked, least_count=10).why
    none = {**frame, "w": np.where(_ROWS < 5, 1.0, 0.0)}
    assert "three rows for each coefficient" in ask(_thirds(none), asked, least_count=5).why
    noisy = TypeAdapter(AnyQuestion).validate_python(asked)
    with pytest.raises(ConfigError, match="no noise is made for weighted sums"):
        noisy.make_noisy({}, "y")
    with pytest.raises(ConfigError, match="weights are from 0 on"):
        ask(_thirds({**frame, "w": _ROWS - 1}), asked)


@_of("elastic_net")
def test_a_penalised_regression_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    params, wanted = case["params"], case["expected"]
    categories = (params["outcome"],) if params["outcome"] == "disease" else ()
    found = ask(silos_of(case["data"]), {"ask": "elastic_net", **params}, categories).values
    assert (found["n"], found["zeros"]) == (wanted["n"], wanted["zeros"])
    for name in ("standardised", "coefficients"):
        close(found[name], wanted[name])


@pytest.mark.parametrize("l1_ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["number", "category"])
def test_a_penalty_fits_columns_that_are_sums_of_others_and_names_a_constant_one(
    kind: str, l1_ratio: float
) -> None:
    categories = ("y",) if kind == "category" else ()
    asked = {"ask": "elastic_net", "outcome": "y", "on": ["x", "z"], "penalty": 0.05, "l1_ratio": l1_ratio}
    frame = {"y": (_ROWS % 7 > 3) * 1.0, "x": _ROWS % 7, "z": 2 * (_ROWS % 7)}
    found = ask(_thirds(frame), asked, categories)
    one, two = found.values["standardised"]
    # The lasso takes either; with a square beside it both take half.
    assert (one > 0 and two == 0) if l1_ratio == 1.0 else abs(one - two) < 1e-8
    found = ask(_thirds({**frame, "z": 0 * _ROWS}), asked, categories)
    assert "singular" in found.why
    assert "'z'" in found.why


def _thirds(frame: Frame) -> list[Frame]:
    return [{name: values[place::3] for name, values in frame.items()} for place in range(3)]


@pytest.mark.parametrize(
    ("kind", "frame", "reason"),
    [
        ("poisson", {"y": _ROWS % 5 * (_ROWS % 2), "x": _ROWS % 2}, "perfect separation"),
        ("poisson", {"y": _ROWS % 5, "x": 0 * _ROWS}, "singular"),
        ("poisson", {"y": 0 * _ROWS, "x": _ROWS % 3}, "fewer rows than the least count"),
        ("negative_binomial", {"y": 3 + _ROWS % 2, "x": _ROWS % 7}, "ask poisson"),
        ("negative_binomial", {"y": (_ROWS % 5) ** 3 * (_ROWS % 2), "x": _ROWS % 2}, "perfect separation"),
    ],
)
def test_counts_that_have_no_fit_say_why(kind: str, frame: Frame, reason: str) -> None:
    found = ask(_thirds(frame), {"ask": kind, "outcome": "y", "on": ["x"]})
    assert reason in found.why
    if "separation" in reason or "singular" in reason:
        assert "'x'" in found.why


def test_what_is_no_count_or_exposure_is_named() -> None:
    asked = {"ask": "poisson", "outcome": "y", "on": ["x"], "exposure": "t"}
    good = {"y": _ROWS % 5, "x": _ROWS % 7, "t": 1 + _ROWS}
    with pytest.raises(ConfigError, match="'y' may be -1"):
        ask(_thirds({**good, "y": _ROWS % 5 - 1}), asked)
    with pytest.raises(TaskError, match="'y' is no whole number in 8 rows"):
        ask(_thirds({**good, "y": _ROWS % 5 / 2}), asked)
    with pytest.raises(TaskError, match="exposure 't' is 0 in 1 rows"):
        ask(_thirds({**good, "t": _ROWS}), asked)


@_of("meta_analysis")
def test_a_meta_analysis_is_that_of_each_silos_fit(case: dict[str, Any]) -> None:
    params, wanted = case["params"], case["expected"]
    categories = (params["outcome"],) if params["outcome"] == "disease" else ()
    silos = silos_of(case["data"])
    # A silo whose outcome never varies has no fit of its own, and is left out.
    silos.append({name: values[values == values][:1].repeat(9) for name, values in silos[0].items()})
    answer = ask(silos, {"ask": "meta_analysis", **params}, categories)
    found = answer.values
    assert (found["n"], found["silos"]) == (wanted["n"], wanted["silos"])
    close(found["Q"], wanted["Q"])
    assert np.allclose(found["I2"], wanted["I2"], rtol=0, atol=1e-9)
    for kind in ("fixed", "dl", "reml"):
        for name in ("estimates", "errors", "errors_hksj", "tau2"):
            assert np.allclose(found[kind][name], wanted[kind][name], rtol=1e-8, atol=0), (kind, name)
    few = ask(silos[:2], {"ask": "meta_analysis", **params}, categories)
    assert "fewer than three silos" in few.why


def _dense_fit(silos: list[Frame], restricted: bool) -> dict[str, Any]:
    """The same model out of whole matrices over all rows."""
    y = np.concatenate([silo["y"] for silo in silos])
    x = np.column_stack([np.ones(len(y)), np.concatenate([silo["x"] for silo in silos])])
    of = np.repeat(np.arange(len(silos)), [len(silo["y"]) for silo in silos])
    z = (of[:, None] == np.arange(len(silos))) * 1.0
    freedom = len(y) - 2 * restricted

    def parts(ratio: float) -> tuple[Any, ...]:
        inverse = np.linalg.inv(np.eye(len(y)) + ratio * z @ z.T)
        cross = np.linalg.inv(x.T @ inverse @ x)
        return inverse, cross, inverse - inverse @ x @ cross @ x.T @ inverse

    def score(ratio: float) -> float:
        inverse, _, p = parts(ratio)
        trace = np.trace(z.T @ (p if restricted else inverse) @ z)
        return float(freedom * ((z.T @ p @ y) ** 2).sum() / (y @ p @ y) - trace)

    ratio = float(optimize.brentq(score, 0.0, 1e5, xtol=1e-14, rtol=1e-14)) if score(0.0) > 0 else 0.0
    inverse, cross, p = parts(ratio)
    residual = float(y @ p @ y) / freedom
    return {
        "coefficients": cross @ x.T @ inverse @ y,
        "errors": np.sqrt(residual * np.diag(cross)),
        "residual_variance": residual,
        "silo_variance": ratio * residual,
    }


@pytest.mark.parametrize("restricted", [True, False])
@pytest.mark.parametrize("between", [0.0, 0.4, 30.0])
def test_an_intercept_for_each_silo_is_that_of_whole_matrices(between: float, restricted: bool) -> None:
    draws = np.random.default_rng(5)
    silos = []
    for number, rows in enumerate((9, 14, 21, 8)):
        x = draws.normal(50, 10, rows)
        # Without a difference between silos: residuals that sum to nothing in each.
        noise = draws.normal(0, 1, rows)
        noise -= noise.mean() if not between else 0.0
        silos.append({"x": x, "y": 3 + 0.1 * x + between * (-1) ** number + noise})
    asked = {"ask": "mixed_intercept", "outcome": "y", "on": ["x"], "restricted": restricted}
    found, wanted = ask(silos, asked).values, _dense_fit(silos, restricted)
    for name, value in wanted.items():
        assert np.allclose(found[name], value, rtol=1e-8, atol=0), name
    assert (found["silo_variance"] == 0) == (between == 0)
    assert "fewer than three silos" in ask(silos[:2], asked).why
