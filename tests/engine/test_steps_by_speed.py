"""Steps by speed: who is slow is given fewer, the same in every attempt, after a restart too."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.engine import make_plan
from roundtable.engine import messages as m
from roundtable.engine.steps_by_speed import steps_by_pace

BY_SPEED = (
    '[algorithm]\nname = "fednova"\nsteps = 10\nwork = "by_speed"\n'
    "[cohort]\nsize = 3\nminimum = 2\ndeadline = 60\n[evaluation]\nevery = 0\n"
)


def started(rounds: int = 4) -> Driver:
    driver = Driver(job(BY_SPEED, rounds))
    driver.join(*"abc")
    driver.send(m.Start())
    return driver


def deliver(driver: Driver, **seconds: float) -> None:
    """Each client's update so many seconds from now, in this order."""
    begun = driver.now
    for client, after in seconds.items():
        driver.advance(begun + after - driver.now)
        driver.update(client)


def asked(driver: Driver, count: int = 3) -> dict[str, int | None]:
    return {each.client: each.steps for each in driver.instructions[-count:]}


def test_slow_silos_are_given_fewer_steps_and_the_same_ones_again() -> None:
    driver = started()
    assert asked(driver) == {"a": 10, "b": 10, "c": 10}, "nothing is known of anybody yet"
    deliver(driver, a=1, b=2, c=10)
    # 0.1, 0.2 and 1 seconds a step: a and b are the faster half, and c is a fifth of b.
    assert asked(driver) == {"a": 10, "b": 10, "c": 2}
    assert driver.notes[-1].detail["steps"] == {"a": 10, "b": 10, "c": 2}
    driver.update("a")
    driver.fail("b")
    driver.fail("c")
    assert driver.step() == m.Step(2, 2, "train")
    assert asked(driver) == {"a": 10, "b": 10, "c": 2}, "another attempt asks for the same"
    driver.now += 1000
    driver.restart()
    assert asked(driver) == {"a": 10, "b": 10, "c": 2}, "and a coordinator that was down"
    driver.send(m.ClientLeft("c"))
    driver.join("c")
    assert asked(driver, 1) == {"c": 2}, "and a silo that was away"
    deliver(driver, a=1, b=1, c=1)
    assert {each.client: each.steps for each in driver.aggregates[-1].updates} == {"a": 10, "b": 10, "c": 2}
    assert asked(driver)["c"] == 2, "the time that the coordinator was down tells nothing of speed"


def test_who_misses_the_deadline_is_at_least_so_slow() -> None:
    driver = started()
    deliver(driver, a=1, b=2)
    driver.advance(58)
    assert driver.records[0].contributors == ("a", "b")
    # Not even 10 steps in 60 seconds, where b takes 0.2 for one: at most 10 · 0.2 / 6.
    assert asked(driver) == {"a": 10, "b": 10, "c": 1}


@given(
    st.dictionaries(st.text(min_size=1, max_size=2), st.none() | st.floats(0, 1e6), min_size=1),
    st.integers(1, 1000),
)
def test_every_client_has_steps_and_the_faster_half_all_of_them(
    paces: dict[str, float | None], most: int
) -> None:
    found = steps_by_pace(paces, most)
    assert found.keys() == paces.keys()
    assert all(1 <= steps <= most for steps in found.values())
    known = sorted(pace for pace in paces.values() if pace is not None)
    for name, pace in paces.items():
        if pace is None or pace <= known[(len(known) - 1) // 2]:
            assert found[name] == most
        else:
            usual = known[(len(known) - 1) // 2]
            assert abs(found[name] * pace - most * usual) <= 0.5001 * pace or found[name] == 1


@pytest.mark.parametrize(
    ("algorithm", "complaint"),
    [
        ('name = "fedavg"\nsteps = 4', r"by_speed\" and algorithm 'fedavg': the model would lean towards"),
        ('name = "fedprox"\nmu = 0.1\nsteps = 4', "lean towards the silos that take many steps"),
        ('name = "scaffold"', 'by_speed" needs steps: the most'),
    ],
)
def test_what_would_be_biased_is_refused(algorithm: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_plan(parse_job(f'task = "t"\n[algorithm]\nwork = "by_speed"\n{algorithm}'), 4)
