"""Silos are asked whether they make the job's model, where parts of it do not travel, before round 1."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job

from roundtable.engine import RoundEngine
from roundtable.engine import messages as m

MODES = {"synchronous": "", "buffered": '[round]\nmode = "buffered"\nbuffer = 3\nconcurrency = 4\n'}
OTHER = "the digest of its tokenizer is aaaa here and bbbb in the job"


def unchecked(text: str = "", *names: str) -> Driver:
    driver = Driver(job("[evaluation]\nevery = 0\n[cohort]\ngrace = 5\n" + text, rounds=1))
    driver.engine = RoundEngine.begin(driver.job, "model-0", 7, unchecked=True)
    driver.join(*names)
    driver.send(m.Start())
    return driver


def asked(driver: Driver, phase: str) -> list[str]:
    return sorted(each.client for each in driver.instructions if each.step.phase == phase)


def agrees(driver: Driver, client: str) -> None:
    driver.send(m.Evaluated(client, driver.step(), {}))


@pytest.mark.parametrize("mode", MODES)
def test_nobody_trains_before_all_who_are_there_have_answered(mode: str) -> None:
    driver = unchecked(MODES[mode], "alder", "birch", "cedar")
    assert asked(driver, m.CHECK) == ["alder", "birch", "cedar"]
    assert asked(driver, m.TRAIN) == []
    agrees(driver, "alder")
    driver.restart()
    driver.join("dogwood")
    agrees(driver, "birch")
    driver.fail("cedar", "model_mismatch", OTHER)
    agrees(driver, "dogwood")
    driver.update("alder")
    driver.update("birch")
    driver.update("dogwood")
    assert asked(driver, m.TRAIN) == ["alder", "birch", "dogwood"]
    (record,) = driver.records
    assert record.failures == {"cedar": OTHER}
    assert asked(driver, m.CHECK).count("alder") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_job_that_lacks_silos_with_its_model_is_paused_and_asks_again(mode: str) -> None:
    driver = unchecked(MODES[mode], "alder", "birch")
    agrees(driver, "alder")
    driver.fail("birch", "model_mismatch", OTHER)
    assert driver.engine.state.status == "paused"
    assert driver.engine.state.reason == (
        f"round 1 does not begin before a silo has the job's model: birch: {OTHER}"
    )
    assert asked(driver, m.TRAIN) == []
    driver.send(m.Resume())
    assert driver.step() == m.Step(1, 2, m.CHECK)
    agrees(driver, "alder")
    agrees(driver, "birch")
    assert asked(driver, m.TRAIN) == ["alder", "birch"]


def test_who_cannot_say_or_says_nothing_holds_up_nobody() -> None:
    driver = unchecked("deadline = 100\n", "alder", "birch", "cedar")
    agrees(driver, "alder")
    driver.fail("birch", "refused", "a person at this silo has to approve the job first")
    driver.advance(101)
    assert [each.client for each in driver.withdrawn] == ["cedar"]
    assert asked(driver, m.TRAIN) == ["alder", "birch", "cedar"]
    assert "client_failed" not in driver.kinds()


def test_one_that_leaves_is_awaited_for_the_grace_time() -> None:
    driver = unchecked("", "alder", "birch")
    agrees(driver, "alder")
    driver.send(m.ClientLeft("birch"))
    assert asked(driver, m.TRAIN) == []
    driver.advance(6)
    assert asked(driver, m.TRAIN) == ["alder"]


def test_a_job_that_is_cancelled_withdraws_what_it_asked() -> None:
    driver = unchecked("", "alder")
    driver.send(m.Cancel("no longer wanted"))
    assert [(each.client, each.step.phase) for each in driver.withdrawn] == [("alder", m.CHECK)]
