"""Sums of relays at the engine: all of a sum's updates count, or none."""

from __future__ import annotations

from engine_driver import Driver, job

from roundtable.engine import messages as m

FOUR = "[cohort]\nsize = 4\nminimum = 2\ndeadline = 60\n[evaluation]\nevery = 0\n[regions]\nsum = true"


def sum_of(driver: Driver, names: str, relay: str = "east") -> m.SumArrived:
    vector = m.BlobReference(f"sum-of-{names}")
    return m.SumArrived(driver.step(), tuple(m.Update(name, vector, 10, relay=relay) for name in names))


def test_a_sum_counts_for_all_of_its_silos_even_where_the_first_would_be_enough() -> None:
    driver = Driver(job(FOUR.replace("size = 4", "size = 2\nover_selection = 2.0"), 1))
    driver.join(*"abcd")
    driver.send(m.Start())
    driver.send(sum_of(driver, "abc"))
    assert [update.client for update in driver.aggregates[0].updates] == ["a", "b", "c"]
    assert driver.records[0].contributors == ("a", "b", "c")
    assert [each.client for each in driver.withdrawn] == ["d"]


def test_a_sum_in_which_somebody_is_not_wanted_changes_nothing() -> None:
    driver = Driver(job(FOUR, 1))
    driver.join(*"abcd")
    driver.send(m.Start())
    driver.update("b")
    for names in ("abc", "az", "b"):
        driver.send(sum_of(driver, names))
    assert set(driver.engine.state.attempt.updates) == {"b"}
    driver.send(sum_of(driver, "ac"))
    driver.restart()
    assert driver.engine.state.attempt.updates["c"].relay == "east"
    driver.send(sum_of(driver, "ac"), sum_of(driver, "d", "west"))
    assert driver.records[0].contributors == tuple("abcd")
