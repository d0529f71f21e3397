"""Restricted means and the C-index over silos are those of the pooled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pooled_survival import pooled_survival, silos_of
from pooled_tables import Frame, answer_of, split

from roundtable.core.errors import ConfigError

MEANS, INDICES = pooled_survival("restricted_means"), pooled_survival("concordance")


def curve(silos: list[Frame], least: int = 1, **asked: Any) -> dict[str, Any]:
    """The answer about a curve, by intervals of 1."""
    question = {"ask": "survival", "time": "time", "event": "event", "every": 1, **asked}
    return dict(answer_of(silos, question, (question["event"], asked.get("by", "")), least).values)


@pytest.mark.parametrize("case", MEANS, ids=[case["id"] for case in MEANS])
def test_a_restricted_mean_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    params = case["params"]
    found = curve(silos_of(case), event=params["event"], until=params["tau"])
    assert found["curves"]["all"]["restricted"]["mean"] == pytest.approx(case["expected"], rel=1e-10)


def test_its_error_without_censoring_is_that_of_a_mean() -> None:
    draw = np.random.default_rng(1)
    group = np.arange(60) % 2 * 1.0
    time = draw.integers(1, 40, 60) * 1.0
    frame = {"time": time, "event": np.ones(60), "g": group}
    found = curve(split(frame, np.arange(60) % 3), by="g", until=20.5)
    means, errors = [], []
    for label, own in zip(("0.0", "1.0"), (time[group == 0], time[group == 1]), strict=True):
        cut = np.minimum(own, 20.5)
        restricted = found["curves"][label]["restricted"]
        means.append(cut.mean())
        errors.append(cut.std() / np.sqrt(len(cut)))
        assert restricted["mean"] == pytest.approx(means[-1], rel=1e-12)
        assert restricted["error"] == pytest.approx(errors[-1], rel=1e-12)
    apart = found["restricted_difference"]
    assert apart["difference"] == pytest.approx(means[1] - means[0], rel=1e-12)
    assert np.ptp(apart["interval"]) == pytest.approx(2 * 1.959963984540054 * np.hypot(*errors), rel=1e-12)


def test_no_mean_is_told_beyond_what_was_seen() -> None:
    frame = {"time": np.array([1, 2, 3, 4, 9, 9.0]), "event": np.array([1, 1, 0, 0, 1, 1.0])}
    for last, seen in (("event", True), ("gone", False)):
        own = {**frame, "time": np.where(frame["time"] == 9, 5, frame["time"]), "gone": frame["event"] * 1}
        own["gone"][4:] = 0
        # The column of times goes up to 9 at a silo whose row has no event told.
        rest = {"time": np.array([9.0]), "event": np.array([np.nan]), "gone": np.array([np.nan])}
        found = curve([own, rest], event=last, until=8)["curves"]["all"]["restricted"]
        assert (found["mean"] is not None) is seen
    with pytest.raises(ConfigError, match="until = 10 is after the last time"):
        curve([frame], until=10)


@pytest.mark.parametrize("case", INDICES, ids=[case["id"] for case in INDICES])
def test_a_c_index_is_that_of_the_pooled_rows(case: dict[str, Any]) -> None:
    params, wanted = case["params"], case["expected"]
    step = 1.0 if case["data"] != "ties" else 0.25
    asked = {"ask": "concordance", **params, "every": 1, "score_every": step}
    found = answer_of(silos_of(case), asked, (params["event"],)).values
    assert [found[key] for key in ("concordant", "discordant", "tied")] == [
        wanted[key] for key in ("concordant", "discordant", "tied_risk")
    ]
    assert found["within"] == 0
    assert found["c_index"] == pytest.approx(wanted["lifelines"], rel=1e-12)
    coarse = answer_of(silos_of(case), {**asked, "score_every": 3.3}, (params["event"],)).values
    assert coarse["within"] > 0
    assert abs(coarse["c_index"] - found["c_index"]) <= coarse["within"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 4)), min_size=3, max_size=20),
)
def test_pairs_are_those_that_one_counts(people: list[tuple[int, bool, int]]) -> None:
    frame = {
        key: np.array([person[place] for person in people], float)
        for place, key in enumerate(("time", "event", "x"))
    }
    asked = {
        "ask": "concordance",
        "time": "time",
        "event": "event",
        "score": "x",
        "every": 1,
        "score_every": 1,
    }
    answer = answer_of(split(frame, np.arange(len(people)) % 3), asked, ("event",))
    if not frame["event"].any():
        assert "no events" in answer.why
        return
    pairs = [0, 0, 0]
    for one, died, score in people:
        for other, died_too, other_score in people:
            if died and (other > one or (other == one and not died_too)):
                pairs[0 if score > other_score else 1 if score < other_score else 2] += 1
    assert [answer.values[key] for key in ("concordant", "discordant", "tied")] == pairs
