"""Cox regression with inverse-probability weights over silos is that of the pooled rows."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from pooled_survival import pooled
from pooled_tables import answer_of, split

EFFECT = {"ask": "weighted_cox", "time": "time", "event": "event", "every": 1, "treatment": "treated"}


def test_the_effect_and_balance_are_those_of_the_pooled_rows(reference_dir: Path) -> None:
    with (reference_dir / "synthetic_iptw.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    frame = {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}
    # No two times are equal, so their ranks say all that Cox regression reads of them.
    frame["time"] = 1.0 + frame["time"].argsort().argsort()
    cases = json.loads((reference_dir / "analytics_cases.json").read_text())["cases"]
    wanted = next(case["expected"] for case in cases if case["analysis"] == "iptw_cox")
    asked = {**EFFECT, "propensity": [f"x{number}" for number in range(10)]}
    found = answer_of(split(frame, np.arange(1000) % 3), asked, ("event", "treated")).values
    assert found["coefficients"] == pytest.approx([wanted["log_hr"]], rel=1e-8)
    assert found["errors"] == pytest.approx([wanted["se_robust"]], rel=1e-8)
    assert found["model_errors"] == pytest.approx([wanted["se_naive"]], rel=1e-8)
    assert found["p"] == pytest.approx([wanted["p_robust"]], rel=1e-8)
    assert found["log_likelihood"] == pytest.approx(wanted["llf"], rel=1e-10)
    assert found["propensity"]["coefficients"] == pytest.approx(wanted["propensity_params"], rel=1e-8)
    assert list(found["effective_sizes"].values()) == pytest.approx(wanted["effective_sample_size"], rel=1e-8)
    for name, (before, after) in wanted["smd_before_after"].items():
        assert found["differences_before"][name] == pytest.approx(before, rel=1e-8, abs=1e-10)
        assert found["differences_after"][name] == pytest.approx(after, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("by_silo", [False, True])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_tied_times_and_silos_are_weighted_too(ties: str, by_silo: bool) -> None:
    whole = pooled("gbsg2")
    frame = {key: values[:240] for key, values in whole.items()}
    frame |= {"time": np.ceil(frame["time"] / 180), "treated": frame["horTh"]}
    owner = np.arange(240) % 3
    asked = {**EFFECT, "propensity": ["age", "post"], "on": ["pnodes"], "ties": ties, "by_silo": by_silo}
    found = answer_of(split(frame, owner), asked, ("event", "treated")).values
    linear = (
        np.column_stack([np.ones(240), frame["age"], frame["post"]]) @ found["propensity"]["coefficients"]
    )
    chance = 1 / (1 + np.exp(-linear))
    weights = np.where(frame["treated"] > 0, 1 / chance, 1 / (1 - chance))
    columns = np.column_stack([frame["treated"], frame["pnodes"]])
    slopes = np.array(found["coefficients"])
    parts = [owner == each for each in range(3)] if by_silo else [owner >= 0]
    gradient = np.zeros(2)
    for part in parts:
        x, time, died, w = (v[part] for v in (columns, frame["time"], frame["event"] > 0, weights))
        risk = w * np.exp(x @ slopes)
        for t in np.unique(time[died]):
            dying = died & (time == t)
            count = int(dying.sum())
            gradient += w[dying] @ x[dying]
            for number in range(count):
                r = risk * ((time >= t) - (number / count * dying if ties == "efron" else 0))
                gradient -= w[dying].mean() * (r @ x) / r.sum()
    errors = np.array(found["model_errors"])
    assert (np.abs(gradient) * errors < 1e-8).all()
    assert not {"lr_p", "aic"} & set(found)


def test_what_has_no_answer_names_the_column() -> None:
    frame = {key: values[:90] for key, values in pooled("gbsg2").items()}
    frame |= {"time": np.ceil(frame["time"] / 180), "treated": frame["horTh"], "twice": 2 * frame["age"]}
    silos = split(frame, np.arange(90) % 3)
    for propensity, why in (
        (["age", "twice"], "singular.*'twice', where 'treated' is explained"),
        (["horTh"], "separation.*'horTh', where 'treated' is explained"),
    ):
        answer = answer_of(silos, {**EFFECT, "propensity": propensity}, ("event", "treated"))
        assert answer.values == {}
        assert re.search(why, answer.why), answer.why
    nobody = [{**silo, "event": 0 * silo["event"]} for silo in silos]
    assert "no events" in answer_of(nobody, {**EFFECT, "propensity": ["age"]}, ("event", "treated")).why
