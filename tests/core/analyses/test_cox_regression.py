"""Cox regression over silos is that of the pooled rows on the same grid of times."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pooled_survival import FOLDER, pooled, pooled_survival, silos_of
from pooled_tables import Frame, answer_of, split

from roundtable.core.analyses.survival.cox_regression import Cox
from roundtable.core.analyses.survival.time_grid import merged
from roundtable.core.errors import PrivacyError
from roundtable.surveys import analyse

CASES = pooled_survival("cox")


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_estimates_are_those_of_the_pooled_rows(case: dict[str, Any]) -> None:
    params, wanted = case["params"], case["expected"]
    categories = (params["event"], *([params["strata"]] if "strata" in params else []))
    answer = answer_of(silos_of(case), {"ask": "cox", **params}, categories, case["least"])
    assert answer.why == ""
    found = answer.values
    errors = np.array(found["errors"])
    away = np.abs(np.array(found["coefficients"]) - wanted["params"])
    assert (away <= 1e-8 * np.maximum(errors, np.abs(wanted["params"]))).all()
    if "bse" in wanted:
        assert np.allclose(errors, wanted["bse"], rtol=1e-8, atol=0)
        assert np.allclose(found["p"], wanted["p"], rtol=1e-7, atol=1e-300)
        assert found["log_likelihood"] == pytest.approx(wanted["llf"], rel=1e-10)
    if "se_robust" in wanted:
        assert np.allclose(errors, wanted["se_robust"], rtol=1e-8, atol=0)
    if "aic" in wanted:
        assert found["aic"] == pytest.approx(wanted["aic"], rel=1e-10)
    if wanted.get("lr_chi2") is not None:
        assert found["lr_chi2"] == pytest.approx(wanted["lr_chi2"], rel=1e-8)
    if "baseline_at_x0" in wanted:
        curve = found["baseline"]["all"]
        seen = np.searchsorted(curve["times"], wanted["baseline_at_x0"]["times"], side="right") - 1
        hazard = np.array(curve["cumulative_hazard"])[seen]
        assert np.allclose(hazard, wanted["baseline_at_x0"]["cumulative_hazard"], rtol=1e-8, atol=0)
    for name, chi2 in wanted.get("schoenfeld", {}).items():
        tested = found["proportional"][name]
        assert np.allclose(tested["chi2"], chi2, rtol=1e-7, atol=1e-9), name
    if "ends" in wanted:
        told = [
            t for t, many in zip(*(found["baseline"]["all"][k] for k in ("times", "events")), strict=True)
        ]
        assert set(wanted["ends"]) <= set(told)
        counts = [many for many in found["baseline"]["all"]["events"] if many]
        assert min(counts) >= case["least"]


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_whas500_over_four_silos_is_that_of_the_pooled_rows(ties: str, reference_dir: Path) -> None:
    """Of 500 people after a heart attack, in days; the data come with scikit-survival."""
    cases = json.loads((reference_dir / "analytics_cases.json").read_text())["cases"]
    (case,) = (
        each
        for each in cases
        if (each["analysis"], each["data"].get("name")) == ("cox", "whas500")
        and each["params"]["ties"] == ties
        and not each["params"]["l2"]
    )
    frame, blocks = whas500(), case["data"]["split"]["blocks"]
    ends = np.cumsum([0, *blocks])
    silos = {
        str(start): {key: values[start:stop] for key, values in frame.items()}
        for start, stop in pairwise(ends)
    }
    asked = {"time": "time", "event": "event", "every": 1.0, "on": case["params"]["columns"], "ties": ties}
    wanted = case["expected"]
    if "schoenfeld" in wanted:
        asked["proportional"] = True
    test_estimates_are_those_of_the_pooled_rows(
        {"data": silos, "params": asked, "expected": wanted, "least": 1}
    )


def whas500() -> Frame:
    """The data set's columns; the test is skipped where scikit-survival is not installed, which has them."""
    found = importlib.util.find_spec("sksurv")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("scikit-survival is not installed: WHAS500 comes with it")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "whas500.arff"
    head, _, body = file.read_text().partition("@DATA")
    names = [line.split()[1] for line in head.splitlines() if line.startswith("@ATTRIBUTE")]
    values = np.array([line.split(",") for line in body.split()], dtype=np.float64)
    frame = dict(zip(names, values.T, strict=True))
    return frame | {"time": frame["lenfol"], "event": frame["fstat"]}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30), st.integers(1, 6))
def test_intervals_are_merged_until_enough_of_each_kind_leave(
    leaving: list[tuple[int, int]], least: int
) -> None:
    counts = np.array(leaving, float).T
    starts = merged(counts, least)
    sums = np.add.reduceat(counts, starts, axis=1)
    assert starts[0] == 0
    if len(starts) > 1:
        assert ((sums == 0) | (sums >= least)).all()
    assert (sums.sum(axis=1) == counts.sum(axis=1)).all()


SURVEY = """
table = "patients"
[columns]
age = {{ least = 0, most = 120 }}
pnodes = {{ least = 0, most = 100 }}
grade = {{ kind = "category", values = [1, 2, 3] }}
time = {{ unit = "days", least = 0, most = 2659 }}
event = {{ kind = "category", values = [0, 1] }}
[[questions]]
ask = "cox"
time = "time"
event = "event"
every = 90
on = ["age", "pnodes"]
strata = "grade"
robust = true
[silos]
{silos}
"""


def test_masked_sums_give_the_same_bits_and_plain_ones_are_refused(tmp_path: Path) -> None:
    rows = (FOLDER / "gbsg2.csv").read_text().splitlines()
    for number in range(3):
        (tmp_path / f"s{number}.csv").write_text("\n".join([rows[0], *rows[1 + number :: 3]]) + "\n")
    survey = tmp_path / "survey.toml"
    survey.write_text(SURVEY.format(silos="\n".join(f's{number} = "s{number}.csv"' for number in range(3))))
    asked = {"ask": "cox", "time": "time", "event": "event", "every": 90.0, "on": ["age", "pnodes"]}
    silos = split(pooled("gbsg2"), np.arange(686) % 3)
    here = answer_of(silos, {**asked, "strata": "grade", "robust": True}, ("event", "grade"), 5).values
    masked = analyse(survey)
    assert masked.masked
    found = masked[0]
    errors = np.array(here["errors"])
    for key in ("coefficients", "errors", "model_errors"):
        # The study states other ranges than the test does: the same but for the last bits of sums.
        assert (np.abs(np.array(found[key]) - here[key]) <= 1e-12 * np.abs(here[key]) + 1e-12 * errors).all()
    with pytest.raises(PrivacyError, match=r"without masks.*secure_aggregation = true"):
        analyse(survey, overrides={"secure_aggregation": False})
    plain = analyse(survey, overrides={"secure_aggregation": False, "least_count": 1})
    assert plain.answers[0].values == analyse(survey, overrides={"least_count": 1}).answers[0].values


def test_steps_too_far_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    # A heavy tail: Newton's steps from 0 overshoot, one of them beyond the range of sums that travel.
    draw = np.random.default_rng(1)
    x = np.exp(2 * draw.normal(size=150)).clip(0, 500)
    time = np.ceil(10 * draw.exponential(1 / (0.2 + 0.5 * np.log1p(x) ** 2)) + 0.01).clip(1, 60)
    frame = {"x": x, "time": time, "event": (draw.random(150) < 0.9) * 1.0}
    halved, beyond = [], []
    taken = Cox.step

    def step(self: Cox, public: Any, sums: Any, stage: int) -> dict[str, Any]:
        found = taken(self, public, sums, stage)
        halved.append(found["stage"] == stage + 2)
        beyond.append(sums["beyond"][0] > 0)
        return found

    monkeypatch.setattr(Cox, "step", step)
    asked = {"ask": "cox", "time": "time", "event": "event", "every": 1, "on": ["x"]}
    found = answer_of(split(frame, np.arange(150) % 3), asked, ["event"]).values
    assert sum(halved) > 1
    assert any(beyond)
    assert abs(naive(frame, found["coefficients"][0])) * found["errors"][0] < 1e-9


def naive(frame: Frame, b: float) -> float:
    """The gradient of Efron's likelihood, person by person."""
    x, time, died = frame["x"], frame["time"], frame["event"] > 0
    gradient = 0.0
    for t in np.unique(time[died]):
        there, dying = time >= t, died & (time == t)
        gradient += x[dying].sum()
        for number in range(int(dying.sum())):
            r = np.exp(b * x) * (there - number / dying.sum() * dying)
            gradient -= float((r * x).sum() / r.sum())
    return gradient


BASE = {"time": [1, 2, 3, 4, 5, 6] * 4, "event": [1, 1, 0, 1, 0, 1] * 4, "x": [0, 1, 0, 2, 1, 1] * 4}
WRONG = {
    "no events": ({"event": [0] * 24}, {}, 1, "no events"),
    "constant": ({"x": [2] * 24}, {}, 1, "constant.*'x'"),
    "collinear": ({"z": [0, 2, 0, 4, 2, 2] * 4}, {"on": ["x", "z"]}, 1, "singular.*'z'"),
    "monotone": ({"x": [1, 1, 0, 0, 0, 0] * 4, "event": [1, 1, 0, 0, 0, 0] * 4}, {}, 1, "separation.*'x'"),
    "few events": ({"event": [1] * 3 + [0] * 21}, {}, 5, "least count"),
    "few censored": ({"event": [0] * 3 + [1] * 21}, {}, 5, "least count.*efron"),
    "few of a stratum": ({"g": [1] * 4 + [0] * 20}, {"strata": "g", "ties": "breslow"}, 5, "least count"),
    "few rows": ({}, {"on": ["x", *"abcdefgh"], **{}}, 1, "three rows"),
}


@pytest.mark.parametrize("by_silo", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_has_a_reason_and_no_answer(wrong: str, by_silo: bool) -> None:
    change, asked, least, reason = WRONG[wrong]
    frame = {key: np.array(value, float) for key, value in {**BASE, **change}.items()}
    frame |= {key: np.arange(24.0) ** 2 % (7 + place) for place, key in enumerate("abcdefgh")}
    question = {"ask": "cox", "time": "time", "event": "event", "every": 1, "on": ["x"], "by_silo": by_silo}
    found = answer_of(split(frame, np.arange(24) // 6 % 3), {**question, **asked}, ("event", "g"), least)
    assert found.values == {}
    assert re.search(reason, found.why), found.why
