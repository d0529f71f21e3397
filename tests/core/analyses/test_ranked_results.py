"""Rank tests, frequent values, components, evaluations equal the pooled libraries' and hide what is small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundtable.core.errors import ConfigError
from tests.core.analyses.test_pooled_results import Frame, ask, close, silos_of

CASES = json.loads((Path(__file__).parent / "ranked_results.json").read_text())["cases"]


def mann_whitney(case: Mapping[str, Any], silos: list[Frame]) -> None:
    params, wanted = case["params"], case["expected"]
    found = ask(silos, {"ask": "mann_whitney", "every": 1.0, **params}, (params["by"],)).values
    close([found["U"]["0.0"], found["kruskal_wallis"]["H"]], [wanted["U"], wanted["H"]])
    assert np.allclose(
        [found["p"], found["kruskal_wallis"]["p"]], [wanted["p"], wanted["H_p"]], rtol=1e-8, atol=0
    )


def components(case: Mapping[str, Any], silos: list[Frame]) -> None:
    found = ask(silos, {"ask": "components", **case["params"]}).values
    for name, value in case["expected"].items():
        close(found[name], value)


def top_values(case: Mapping[str, Any], silos: list[Frame]) -> None:
    every = 1.0 if case["params"]["column"] == "age" else 0.1
    found = ask(silos, {"ask": "top_values", "every": every, **case["params"]}).values
    assert found["values"] == case["expected"]


def evaluate(case: Mapping[str, Any], silos: list[Frame]) -> None:
    first, *slopes = case["params"]["coefficients"]
    for silo in silos:
        linear = first + sum(
            b * silo[name] for b, name in zip(slopes, ("age", "thalach", "oldpeak"), strict=True)
        )
        silo["p"] = 1 / (1 + np.exp(-linear))
    asked = {"ask": "evaluate", "score": "p", "outcome": "disease", "by": "sex"}
    asked |= {"every": case["params"]["every"]}
    found = ask(silos, asked, ("disease", "sex"), ranges={"p": (0.0, 1.0)}).values
    wanted = case["expected"]
    assert (found["rows"], found["confusion"]) == (wanted["n"], wanted["confusion"])
    for name in ("auroc", "auroc_error", "auprc", "brier", "log_loss"):
        close([found[name]], [wanted[name]])
    assert abs(found["auroc"] - wanted["auroc_exact"]) < found["auroc_within"] < 1e-3
    for name in ("observed", "predicted"):
        close([each[name] for each in found["calibration"]], wanted[name])
    gains = {f"{each['threshold']:.1f}": each["net_benefit"] for each in found["decision"]}
    close([gains[key] for key in wanted["net_benefit"]], list(wanted["net_benefit"].values()))
    for group, figures in wanted["groups"].items():
        assert found["groups"][group]["confusion"] == figures["confusion"]
        close([found["groups"][group]["auroc"]], [figures["auroc"]])


CHECKS = {each.__name__: each for each in (mann_whitney, components, top_values, evaluate)}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_an_answer_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    CHECKS[case["analysis"]](case, silos_of(case["data"]))


def test_no_figure_of_an_evaluation_tells_of_a_small_cell() -> None:
    rows = np.arange(300.0)
    score = (rows % 50) / 50 + 0.01
    few = (rows % 50 == 49) & (rows >= 200)
    frame = {"p": score, "ill": np.where(score > 0.9, ~few, rows % 3 == 0) * 1.0, "g": (rows < 8) * 1.0}
    silos = [{name: values[place::3] for name, values in frame.items()} for place in range(3)]
    asked = {"ask": "evaluate", "score": "p", "outcome": "ill", "by": "g", "threshold": 0.9}
    answer = ask(silos, asked, ("ill", "g"), ranges={"p": (0.0, 1.0)}, least_count=5)
    found = answer.values
    assert few.sum() == 2
    assert answer.hidden
    # Two bins at least are hidden, none of them alone beyond the threshold, and no group is left of two.
    assert len(found["calibration"]) <= 8
    assert None in np.array(found["confusion"]).ravel()
    assert [each["sensitivity"] for each in found["groups"].values()] == [None, None]
    told = np.array([each["threshold"] for each in found["decision"]])
    shown = {round(each["from"], 9) for each in found["calibration"]}
    for low, high in zip([0.0, *sorted(told)], [*sorted(told), 1.0], strict=True):
        hidden = [edge for edge in np.arange(10) / 10 if low - 1e-9 <= edge < high - 1e-9]
        assert sum(round(edge, 9) not in shown for edge in hidden) != 1


def test_frequent_values_end_where_few_rows_have_them_and_grids_are_bounded() -> None:
    frame = {"x": np.repeat([3.0, 1.0, 2.0], [9, 7, 4])}
    silos = [{"x": frame["x"][place::3]} for place in range(3)]
    answer = ask(silos, {"ask": "top_values", "column": "x", "every": 1.0}, least_count=5)
    assert answer.values["values"] == [[3.0, 9], [1.0, 7]]
    assert answer.notes == ["no other value is that of 5 rows"]
    for every, said in ((1e-6, "take a wider every"), (None, "the width of the grid")):
        with pytest.raises(ConfigError, match=said):
            ask(silos, {"ask": "top_values", "column": "x", "every": every})
