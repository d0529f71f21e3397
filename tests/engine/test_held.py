"""Clients that are drained or disabled: what they were asked they finish, nothing new is asked of them."""

from __future__ import annotations

from engine_driver import Driver, job

from roundtable.engine import messages as m

COHORT = '[cohort]\nsize = 2\nminimum = 2\nstrategy = "round_robin"\n'
QUIET = "[evaluation]\nevery = 0\n"


def hold(driver: Driver, client: str, held: m.Held | None = "drained") -> None:
    driver.send(m.ClientHeld(client, held))


def started(clients: str, text: str, rounds: int = 3) -> Driver:
    driver = Driver(job(text, rounds))
    driver.join(*clients)
    return driver


def asked(driver: Driver, round: int) -> list[str]:
    return [each.client for each in driver.instructions if each.step.round == round]


def test_one_that_trains_finishes_its_round_and_is_asked_for_no_other() -> None:
    driver = started("abc", COHORT + '[evaluation]\nevery = 1\nclients = "cohort"\n')
    driver.send(m.Start())
    assert asked(driver, 1) == ["a", "b"]
    hold(driver, "a")
    driver.advance(30)
    driver.send(m.ClientJoined(m.ClientInfo("a", held="drained")))
    assert asked(driver, 1) == ["a", "b", "a"], "it comes back within its round, and is asked for that again"
    driver.update("a")
    driver.update("b")
    evaluating = [each.client for each in driver.instructions if each.step == m.Step(1, 1, m.EVALUATE)]
    assert sorted(evaluating) == ["a", "b"], "the round that it was asked for includes the evaluation"
    for name in "ab":
        driver.evaluate(name)
    assert asked(driver, 2) == ["b", "c"]


def test_a_job_that_lacks_clients_says_whose_doing_that_is_and_goes_on_once_it_has_them() -> None:
    driver = started("abcde", "[cohort]\nsize = 4\nminimum = 4\n" + QUIET)
    hold(driver, "a")
    hold(driver, "b", "disabled")
    hold(driver, "e")
    driver.send(m.Start())
    said = "2 of 5 are drained by their silos: a, e; 1 of 5 is disabled by operators: b"
    assert driver.engine.view().waiting_for.endswith(said)
    (waits,) = [note.message for note in driver.notes if note.kind == "waiting_for_clients"]
    assert waits == "2 of 4 clients are available; waiting for more to connect; " + said
    hold(driver, "e", None)
    assert asked(driver, 1) == []
    hold(driver, "b", None)
    assert asked(driver, 1) == ["b", "c", "d", "e"]
    held = [note.detail for note in driver.notes if note.kind == "client_held"]
    assert held[-1] == {"silo": "b", "held": ""}


WAITING = "[cohort]\nsize = 4\nminimum = 2\nwait = 30\n" + QUIET


def test_nobody_waits_for_one_that_is_held() -> None:
    driver = started("abc", WAITING)
    driver.join("d")
    hold(driver, "d")
    driver.send(m.Start())
    assert asked(driver, 1) == ["a", "b", "c"]
    # The same cohort as after the wait, to the last draw.
    later = started("abc", WAITING)
    later.send(m.Start())
    assert asked(later, 1) == []
    later.advance(30)
    assert asked(later, 1) == ["a", "b", "c"]


def test_one_that_is_held_while_a_round_waits_for_its_cohort_ends_the_wait() -> None:
    driver = started("abcd", WAITING)
    driver.send(m.ClientLeft("d"))
    driver.send(m.Start())
    assert asked(driver, 1) == []
    hold(driver, "d", "disabled")
    assert asked(driver, 1) == ["a", "b", "c"]


def test_others_who_may_come_are_waited_for() -> None:
    driver = started("abcde", WAITING)
    driver.send(m.ClientLeft("e"))
    hold(driver, "d")
    driver.send(m.Start())
    assert asked(driver, 1) == [], "e may take the place of d"
    assert "3 of 4 clients" in driver.engine.view().waiting_for
    driver.advance(30)
    assert asked(driver, 1) == ["a", "b", "c"]


def test_nobody_who_is_held_stands_in_for_one_that_fails() -> None:
    driver = started("abcd", COHORT.replace("minimum = 2", "minimum = 1") + QUIET)
    hold(driver, "c")
    driver.send(m.Start())
    driver.fail("a")
    assert asked(driver, 1) == ["a", "b", "d"]


def test_a_draw_from_all_who_are_known_may_hit_one_and_gives_up_on_it_at_once() -> None:
    """The accountant's sample stays the one that was drawn; silos that mask are told of those that come."""
    driver = started("abc", '[cohort]\nstrategy = "poisson"\nprobability = 1.0\n' + QUIET)
    hold(driver, "b", "disabled")
    driver.send(m.Start())
    assert asked(driver, 1) == ["a", "c"]
    assert all(each.cohort == ("a", "c") for each in driver.instructions)
    driver.update("a")
    driver.update("c")
    record = driver.records[0]
    assert (record.cohort, record.contributors) == (("a", "b", "c"), ("a", "c"))
    assert "disabled by operators" in record.failures["b"]


def test_buffered_rounds_leave_it_out_too() -> None:
    driver = started("ab", '[round]\nmode = "buffered"\nbuffer = 1\n' + QUIET, rounds=2)
    driver.send(m.Start())
    hold(driver, "a")
    hold(driver, "b")
    driver.update("a", m.Step(1, 1, m.TRAIN))
    driver.update("b", m.Step(1, 1, m.TRAIN))
    assert asked(driver, 2) == []
    driver.restart()
    assert asked(driver, 2) == []


def test_one_that_is_held_stays_so_when_it_joins_again() -> None:
    driver = started("b", COHORT + QUIET)
    driver.send(m.ClientJoined(m.ClientInfo("a", held="disabled")), m.Start())
    assert asked(driver, 1) == []
    driver.send(m.ClientJoined(m.ClientInfo("a")))
    assert asked(driver, 1) == ["a", "b"]
