"""An engine gives up its turn between two attempts, and goes on where it was when it gets it back."""

from __future__ import annotations

from engine_driver import Driver, job

from roundtable.engine import messages as m

PAIR = "[cohort]\nsize = 2\nminimum = 2\nretries = 1\n[evaluation]\nevery = 0\n"


def test_a_turn_ends_with_the_round_and_the_next_one_begins_where_it_ended_over_a_restart() -> None:
    driver = Driver(job(PAIR, 2))
    driver.join("a", "b")
    driver.send(m.Start(), m.Yield("another goes first"))
    for name in "ab":
        driver.update(name)
    assert (driver.engine.queued, driver.engine.state.reason) == (True, "another goes first")
    driver.restart()
    driver.join("a", "b")
    assert driver.engine.queued, "it begins nothing before it is its turn"
    driver.send(m.Start())
    assert driver.step() == m.Step(2, 1, m.TRAIN)


def test_turns_in_which_nobody_was_asked_are_no_attempts_that_have_failed() -> None:
    driver = Driver(job(PAIR, 1))
    driver.join("a")
    for _ in range(5):
        driver.send(m.Start(), m.Yield("too few silos"))
        assert driver.engine.queued
    driver.join("b")
    driver.send(m.Start())
    assert driver.step() == m.Step(1, 1, m.TRAIN)
    driver.fail("a")
    assert driver.engine.state.status != "paused", "its first failure is its first"


def test_a_job_that_is_held_takes_no_turn_until_it_is_released() -> None:
    driver = Driver(job(PAIR, 1))
    driver.join("a", "b")
    driver.send(m.MovedInQueue(hold="review"), m.Start())
    assert driver.engine.queued
    driver.now += 7 * 86400.0
    driver.send(m.MovedInQueue(hold=""))
    assert driver.engine.state.queued == driver.now, "a week of review lifts it above nobody"
    driver.send(m.Start())
    assert driver.step() == m.Step(1, 1, m.TRAIN)
