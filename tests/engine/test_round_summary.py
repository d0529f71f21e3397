"""What the engine keeps of committed rounds: enough for every question, as much after many as after few."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from engine_driver import Driver, job
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.config import JobConfig, parse_job
from roundtable.core.job_tables.keep_table import KeepTable
from roundtable.core.job_tables.stop_table import StopTable, larger_is_better
from roundtable.engine import messages as m
from roundtable.engine.round_summary import RoundSummary
from roundtable.engine.stopping import stop_reason

values = st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.55, 0.9, 1.0, math.nan])


def record(number: int, evaluated: float | None, trained: float | None) -> m.RoundRecord:
    def sums(value: float | None) -> dict[str, tuple[float, int]]:
        return {} if value is None else {"score": (4 * value, 4)}

    return m.RoundRecord(
        round=number,
        attempt=1,
        model=f"model-{number}",
        optimizer="",
        cohort=("a", "b"),
        contributors=(f"client-{number}",),
        failures={},
        excluded={},
        weights={},
        training=sums(trained),
        evaluation=sums(evaluated),
        client_metrics={},
        diagnosis={},
        charge={},
        started=0.0,
        ended=1.0,
    )


def naive(stop: StopTable, told: list[tuple[float | None, float | None]]) -> str | None:
    """The rules read off the whole list of values."""
    found = [e for e, _ in told if e is not None] or [t for _, t in told if t is not None]
    if not found:
        return None
    better = (lambda a, b: a - b) if stop.larger_is_better else (lambda a, b: b - a)
    if stop.target is not None and better(found[-1], stop.target) >= 0:
        return "reached"
    best, at = None, -1
    for place, value in enumerate(found):
        if math.isfinite(value) and (best is None or better(value, best) > stop.minimum_improvement):
            best, at = value, place
    if stop.patience is not None and len(found) - 1 - at >= stop.patience:
        return "not improved"
    return None


def with_stop(stop: StopTable, keep_best: bool = False) -> JobConfig:
    keep = KeepTable(best=keep_best)
    return parse_job('task = "t"\nrounds = 12').model_copy(update={"stop": stop, "keep": keep})


@given(
    told=st.lists(st.none() | st.sampled_from([-math.inf, 0.1, 0.5, 0.9, math.inf, math.nan]), max_size=12),
    larger=st.booleans(),
    before=st.booleans(),
    margin=st.sampled_from([0.0, 0.5]),
)
def test_the_best_model_is_the_first_of_the_best_values(
    told: list[float | None], larger: bool, before: bool, margin: float
) -> None:
    """Read off the whole list; what was measured before a round is of the model of the round before it."""
    stop = StopTable(metric="score", larger_is_better=larger, minimum_improvement=margin)
    summary, keeping = RoundSummary(), with_stop(stop, keep_best=True)
    for number, value in enumerate(told, start=1):
        made = record(number, None if before else value, 0.99)
        if before and value is not None:
            made = replace(made, before={"score": (value, 1)})
        summary.add(made, keeping, 1)
        found = [(v, n) for n, v in enumerate(told[:number], 1) if v is not None and math.isfinite(v)]
        expected = min(found, key=lambda pair: (-pair[0] if larger else pair[0], pair[1]), default=None)
        best = summary.best
        assert (best and (best.value, best.round)) == (expected and (expected[0], expected[1] - before))


@given(
    told=st.lists(st.tuples(values, values), max_size=12),
    larger=st.booleans(),
    target=st.none() | st.sampled_from([0.3, 0.9]),
    patience=st.none() | st.integers(1, 3),
    margin=st.sampled_from([0.0, 0.1]),
)
def test_the_stop_rules_are_those_of_the_whole_list(
    told: list[tuple[float | None, float | None]],
    larger: bool,
    target: float | None,
    patience: int | None,
    margin: float,
) -> None:
    stop = StopTable(
        metric="score", target=target, patience=patience, larger_is_better=larger, minimum_improvement=margin
    )
    summary, stopping = RoundSummary(), with_stop(stop)
    for number, (evaluated, trained) in enumerate(told, start=1):
        summary.add(record(number, evaluated, trained), stopping, 1)
        said, expected = stop_reason(stop, summary.trend, 0.0), naive(stop, told[:number])
        assert (said is None) == (expected is None)
        assert expected is None or (said is not None and expected in said)


@pytest.mark.parametrize("separation", [1, 2, 4])
def test_it_grows_with_the_separation_and_not_with_the_rounds(separation: int) -> None:
    summary = RoundSummary()
    for number in range(1, 101):
        summary.add(record(number, 0.5, 0.5), with_stop(StopTable(metric="score", patience=200)), separation)
    assert summary.done == 100
    assert summary.recent == [(f"client-{number}",) for number in range(102 - separation, 101)]
    assert all(len(value) < 100 for value in asdict(summary).values() if isinstance(value, (list, dict)))


def test_a_restored_engine_has_the_same() -> None:
    driver = Driver(job('[cohort]\nsize = 1\n[stop]\nmetric = "loss"\npatience = 3', rounds=9), separation=2)
    driver.join("a", "b", "c")
    driver.send(m.Start())
    for loss in (0.5, 0.4, 0.6):
        driver.update(driver.cohort()[0], loss=loss)
        while driver.step().phase == m.EVALUATE:
            driver.send(m.Evaluated(next(iter(driver.engine.state.attempt.awaited)), driver.step(), {}))
    before = driver.engine.state.summary
    driver.restart()
    assert driver.engine.state.summary == before
    assert (before.done, before.trend.stale, len(before.recent)) == (3, 1, 1)


@pytest.mark.parametrize(
    "name", ["loss", "token_perplexity", "val_rmse", "dose_mae", "mse", "risk_ece", "Brier"]
)
def test_a_metrics_name_says_that_smaller_is_better(name: str) -> None:
    assert not larger_is_better(name, StopTable())
    assert larger_is_better(name, StopTable(metric=name, larger_is_better=True))


@pytest.mark.parametrize("name", ["accuracy", "risk_c_index", "answer_length", "nucleus_dice", "dose_r2"])
def test_of_other_metrics_the_larger_is_better(name: str) -> None:
    assert larger_is_better(name, StopTable())
