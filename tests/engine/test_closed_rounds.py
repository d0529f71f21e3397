"""A round whose sum may have been unmasked is never tried again: it ends with its model, or without one."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job

from roundtable.engine import messages as m

COST = {"epsilon": 0.5}


def masked(rounds: int = 3, retries: int = 1, every: int = 0) -> Driver:
    """A job of which the updates of the first round are here, and nobody was asked for a share."""
    text = f"[cohort]\nsize = 3\nretries = {retries}\n[evaluation]\nevery = {every}"
    driver = Driver(job(text, rounds=rounds), automatic=False)
    driver.join("a", "b", "c")
    driver.send(m.Start())
    deliver(driver)
    return driver


def deliver(driver: Driver) -> None:
    for name in "abc":
        driver.update(name)
    assert driver.step().phase == m.AGGREGATE


def unmask(driver: Driver) -> None:
    driver.send(m.Unmasking(driver.step(), COST))


def fail(driver: Driver, reason: str = "two of three shares") -> None:
    """What was being combined cannot be; what follows from that is made durable."""
    driver.send(m.AggregationFailed(driver.step(), reason))
    driver.pending = [action for action in driver.pending if not isinstance(action, m.Aggregate)]
    driver.finish_pending()


def asked(driver: Driver) -> list[m.Step]:
    return [action.step for action in driver.said if isinstance(action, m.Unmask)]


def test_before_anybody_is_asked_the_round_is_tried_again() -> None:
    driver = masked()
    fail(driver)
    assert driver.step() == m.Step(1, 2, m.TRAIN)
    assert not driver.records


def test_afterwards_it_is_closed_with_its_charge_and_the_next_begins() -> None:
    driver = masked()
    unmask(driver)
    fail(driver)
    assert asked(driver) == [m.Step(1, 1, m.AGGREGATE)]
    (record,) = driver.records
    assert (record.round, record.attempt, record.model) == (1, 1, "model-0")
    assert (record.contributors, record.charge, record.closed) == ((), COST, "two of three shares")
    assert driver.step() == m.Step(2, 1, m.TRAIN)
    assert {each.model for each in driver.instructions if each.step.round == 2} == {"model-0"}
    assert "its sum may be known: two of three shares" in driver.notes[-2].message
    deliver(driver)
    unmask(driver)
    driver.finish_pending()
    assert (driver.records[1].model, driver.records[1].closed) == ("model-2", "")


def test_an_attempt_that_is_over_is_not_unmasked() -> None:
    driver = masked()
    late = driver.step()
    fail(driver)
    driver.send(m.Unmasking(late, COST))
    deliver(driver)
    driver.send(m.Unmasking(late, COST))
    assert asked(driver) == []
    driver.send(m.Pause("lunch"))
    driver.send(m.Unmasking(m.Step(1, 2, m.AGGREGATE), COST))
    assert asked(driver) == []


def test_updates_that_are_damaged_are_not_asked_for_again_once_they_may_be_summed() -> None:
    driver = masked()
    unmask(driver)
    driver.send(m.AggregationFailed(driver.step(), "rotten", {"a": "rotten"}))
    driver.finish_pending()
    assert driver.records[0].closed == "rotten"


@pytest.mark.parametrize(("event", "status"), [(m.Pause("lunch"), "paused"), (m.Cancel("no"), "cancelled")])
def test_a_stop_while_it_is_unmasked_closes_it(event: m.Event, status: str) -> None:
    driver = masked()
    unmask(driver)
    driver.send(event)
    driver.pending = [action for action in driver.pending if isinstance(action, m.Commit)]
    driver.finish_pending()
    assert driver.engine.state.status == status
    assert driver.records[0].charge == COST
    assert f"the job was {status} while it was unmasked" in driver.records[0].closed
    driver.send(m.Resume())
    assert (status == "paused") == (driver.engine.state.attempt is not None)
    assert status == "cancelled" or driver.step() == m.Step(2, 1, m.TRAIN)


@pytest.mark.parametrize(("event", "status"), [(m.Pause("lunch"), "paused"), (m.Cancel("no"), "cancelled")])
def test_a_stop_while_its_model_is_evaluated_commits_it(event: m.Event, status: str) -> None:
    driver = masked(every=1)
    unmask(driver)
    driver.pending.clear()
    driver.send(m.Aggregated(driver.step(), "model-1"))
    driver.evaluate("a")
    assert driver.step().phase == m.EVALUATE
    driver.send(event)
    assert {withdrawn.client for withdrawn in driver.withdrawn[-2:]} == {"b", "c"}
    driver.finish_pending()
    (record,) = driver.records
    assert (record.model, record.closed, list(record.client_metrics)) == ("model-1", "", ["a"])
    assert driver.engine.state.status == status


def test_after_so_many_on_end_the_job_pauses_and_goes_on_when_told() -> None:
    driver = masked(rounds=9, retries=1)
    for number in (1, 2):
        assert driver.engine.state.status == "running"
        unmask(driver)
        fail(driver, f"no shares in round {number}")
        if number == 1:
            deliver(driver)
    assert driver.statuses[-1] == m.StatusChanged(
        "paused", "2 rounds on end were closed without a model; the last reason: no shares in round 2"
    )
    driver.send(m.Resume())
    assert driver.step() == m.Step(3, 1, m.TRAIN)
    deliver(driver)
    unmask(driver)
    driver.finish_pending()
    deliver(driver)
    unmask(driver)
    fail(driver)
    assert [bool(record.closed) for record in driver.records] == [True, True, False, True]
    assert driver.engine.state.status == "running", "a model in between counts anew"


def test_a_job_that_ends_so_says_how_many_rounds_made_no_model() -> None:
    driver = masked(rounds=2)
    driver.finish_pending()
    deliver(driver)
    unmask(driver)
    fail(driver)
    assert driver.statuses[-1] == m.StatusChanged(
        "finished", "all 2 rounds are done, 1 of them without a model"
    )


def test_a_job_without_any_model_has_failed() -> None:
    driver = masked(rounds=1, retries=0)
    unmask(driver)
    fail(driver)
    assert driver.statuses[-1] == m.StatusChanged(
        "failed", "none of the 1 rounds has made a model; the history says why"
    )


@pytest.mark.parametrize("paused", [False, True])
def test_a_restart_remembers_that_it_may_be_known(paused: bool) -> None:
    driver = masked()
    unmask(driver)
    driver.restart()
    assert [type(action) for action in driver.pending] == [m.Aggregate]
    if paused:
        driver.send(m.Pause("lunch"))
    else:
        driver.send(m.AggregationFailed(driver.step(), "what it had heard is lost"))
    driver.pending = [action for action in driver.pending if isinstance(action, m.Commit)]
    driver.restart()
    driver.finish_pending()
    assert driver.records[0].closed
    assert len(driver.records) == 1


def test_a_pause_after_the_last_round_leaves_nothing_to_resume() -> None:
    driver = masked(rounds=1)
    unmask(driver)
    driver.pending.clear()
    driver.send(m.Aggregated(driver.step(), "model-1"), m.Pause("lunch"))
    driver.finish_pending()
    assert driver.engine.state.status == "paused"
    driver.send(m.Resume())
    assert driver.statuses[-1] == m.StatusChanged("finished", "all 1 rounds are done")


SECURE = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0'
NOISY = (
    '[privacy]\nlevel = "distributed"\nclip_norm = 1.0\nnoise_multiplier = 1.0\ndelta = 1e-5\n'
    '[aggregation]\nweighting = "uniform"'
)


def closed_once(privacy: str, names: str = "abcdef") -> tuple[Driver, tuple[str, ...]]:
    """A job whose first round was closed after its clients may have unmasked its sum; and who they are."""
    text = f"[cohort]\nsize = 4\nminimum = 3\nretries = 3\n[evaluation]\nevery = 0\n{privacy}"
    driver = Driver(job(text, rounds=9), automatic=False)
    driver.join(*names)
    driver.send(m.Start())
    driver.finish_pending()
    summed = driver.cohort()[:3]
    for name in summed:
        driver.update(name)
    driver.fail(driver.cohort()[3])
    unmask(driver)
    fail(driver)
    driver.finish_pending()
    return driver, summed


def test_until_the_model_changes_the_same_clients_are_summed_again() -> None:
    """Silos refuse a second sum from one model over others: their difference would tell of few."""
    driver, summed = closed_once(SECURE)
    for _ in range(2):
        assert (driver.step().round, driver.cohort()) == (2, summed)
        driver.restart()
    driver.fail(summed[0])
    driver.finish_pending()
    assert (driver.step(), driver.cohort()) == (m.Step(2, 2, m.TRAIN), summed), "all of them, or no sum"
    for round in (2, 3):
        assert driver.step().round == round
        for name in driver.cohort():
            driver.update(name)
        driver.finish_pending()
    assert len(driver.cohort()) == 4, "a new model is anybody's"


def test_where_one_of_them_is_gone_only_others_are_asked() -> None:
    driver, summed = closed_once(SECURE)
    others = sorted(set("abcdef") - set(summed))
    driver.send(m.ClientLeft(summed[1]))
    driver.fail(summed[1])
    driver.finish_pending()
    assert driver.kinds()[-1] == "waiting_for_clients"
    said = driver.notes[-1].message
    assert f"a sum of {', '.join(summed)} from this model may be known" in said
    driver.join("g")
    assert driver.cohort() == tuple(sorted([*others, "g"]))


def test_with_noise_in_every_sum_any_clients_are_asked() -> None:
    driver, _ = closed_once(NOISY)
    assert len(driver.cohort()) == 4
