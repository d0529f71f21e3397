"""What the engine keeps of committed rounds: enough for every question, as much after many as after few."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from engine_driver import Driver, job
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.config import StopTable
from roundtable.engine import messages as m
from roundtable.engine.round_summary import RoundSummary
from roundtable.engine.stopping import stop_reason

values = st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.55, 0.9, 1.0])


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
    best, at = found[0], 0
    for place, value in enumerate(found):
        if better(value, best) > stop.minimum_improvement:
            best, at = value, place
    if stop.patience is not None and len(found) - 1 - at >= stop.patience:
        return "not improved"
    return None


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
    summary = RoundSummary()
    for number, (evaluated, trained) in enumerate(told, start=1):
        summary.add(record(number, evaluated, trained), stop, 1)
        said, expected = stop_reason(stop, summary.trend, 0.0), naive(stop, told[:number])
        assert (said is None) == (expected is None)
        assert expected is None or (said is not None and expected in said)


@pytest.mark.parametrize("separation", [1, 2, 4])
def test_it_grows_with_the_separation_and_not_with_the_rounds(separation: int) -> None:
    summary = RoundSummary()
    for number in range(1, 101):
        summary.add(record(number, 0.5, 0.5), StopTable(metric="score", patience=200), separation)
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
