"""Buffered rounds under masks: whom a group is of, who is let go, what becomes of a group that fails."""

from __future__ import annotations

from engine_driver import Driver, job

from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m

MASKS = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n[evaluation]\nevery = 0'


def masked(size=3, concurrency=None, rounds=4, clients="abcdef", cohort="", **more):
    lines = ["[round]", 'mode = "buffered"', f"buffer = {size}", MASKS]
    lines[3:3] = [f"concurrency = {concurrency}"] if concurrency else []
    lines += ["[cohort]", cohort] if cohort else []
    driver = Driver(job("\n".join(lines), rounds=rounds), **more)
    driver.send(m.Start())
    driver.join(*clients)
    return driver


def prepare(driver, *names):
    for name in names:
        driver.send(m.UpdateReady(name, driver.engine.state.at_work[name].step))


def upload(driver, *names):
    for name in names:
        driver.update(name, examples=0)


def group(driver):
    return sorted(driver.engine.state.attempt.group)


def asked_to_mask(driver):
    return [(each.client, each.step, each.prepared) for each in driver.instructions if each.prepared]


def test_so_many_that_are_ready_from_one_model_mask_among_each_other():
    driver = masked()
    prepare(driver, "c", "a")
    assert group(driver) == []
    prepare(driver, "f")
    assert group(driver) == ["a", "c", "f"]
    told = [each for each in driver.instructions if each.prepared]
    assert {each.cohort for each in told} == {("a", "c", "f")}
    assert {(each.step, each.prepared) for each in told} == {(m.Step(1, 1, "train"), (1, 1))}
    upload(driver, "a", "c", "f")
    assert driver.records[0].contributors == ("a", "c", "f")
    assert driver.records[0].cohort == ("a", "c", "f")
    prepare(driver, "a", "b", "d", "e")
    upload(driver, "b", "d", "e")
    assert driver.records[1].staleness == {"b": 1, "d": 1, "e": 1}


def test_too_few_of_an_old_model_drop_their_work_and_are_waited_for_next_time():
    driver = masked(clients="abcd")
    prepare(driver, "a", "b", "c")
    upload(driver, "a", "b", "c")
    assert [(each.client, each.step) for each in driver.withdrawn] == [("d", m.Step(1, 1, "prepare"))]
    assert driver.engine.state.at_work["d"].model == "model-1"
    prepare(driver, "a", "b", "c")
    assert group(driver) == []
    prepare(driver, "d")
    assert group(driver) == ["a", "b", "d"]
    upload(driver, "a", "b", "d")
    assert driver.engine.state.owed == ("c",)


def test_fewer_than_a_buffer_are_a_group_where_no_more_of_their_model_can_come():
    driver = masked(size=4, clients="abcdefg")
    prepare(driver, "a", "b", "c", "d")
    upload(driver, "a", "b", "c", "d")
    prepare(driver, "e", "f")
    assert group(driver) == []
    prepare(driver, "g")
    assert group(driver) == ["e", "f", "g"]


def test_of_the_newest_model_too_once_nobody_else_has_come_for_the_grace_time():
    driver = masked(size=4, clients="abc", cohort="grace = 5")
    prepare(driver, "a", "b", "c")
    assert group(driver) == []
    driver.advance(6)
    assert group(driver) == ["a", "b", "c"]


def test_a_group_that_fails_is_ready_again_and_masks_under_another_number():
    driver = masked(clients="abc", automatic=False)
    prepare(driver, "a", "b", "c")
    upload(driver, "a", "b", "c")
    driver.send(m.AggregationFailed(driver.step(), "too few answered"))
    assert asked_to_mask(driver)[3:] == [(name, m.Step(1, 2, "train"), (1, 1)) for name in "abc"]


def test_who_fails_in_a_group_of_the_fewest_costs_the_attempt_and_the_others_keep_their_updates():
    driver = masked(clients="abcd")
    prepare(driver, "a", "b", "c")
    step = driver.step()
    driver.send(m.ClientFailed(step, SiteFailure("b", 1, 1, "train", "node_failure", "keys are gone")))
    assert driver.step() == m.Step(1, 2, "train")
    assert sorted(driver.engine.state.ready) == ["a", "c"]
    assert driver.engine.state.at_work["b"].step == m.Step(1, 2, "prepare")
    prepare(driver, "d")
    assert group(driver) == ["a", "c", "d"]


def test_a_sum_that_may_be_known_is_made_again_by_all_of_its_clients_or_by_none():
    driver = masked(clients="abcde", automatic=False)
    prepare(driver, "a", "b", "c")
    upload(driver, "a", "b", "c")
    driver.send(m.Unmasking(driver.step()), m.AggregationFailed(driver.step(), "shares are missing"))
    driver.finish_pending()
    state = driver.engine.state
    assert state.summed == ("a", "b", "c")
    assert sorted(state.at_work) == ["d", "e"]
    prepare(driver, "d", "e")
    assert sorted(state.at_work) == ["a", "b", "c"], "two others are too few, and were let go"
    prepare(driver, "a", "b")
    driver.send(m.ClientJoined(m.ClientInfo("f")))
    assert "f" not in state.at_work
    prepare(driver, "c")
    assert group(driver) == ["a", "b", "c"]


def test_a_finished_update_whose_silo_does_not_come_back_keeps_nobody_waiting():
    driver = masked(clients="abcd", cohort="grace = 5\ndeadline = 20")
    prepare(driver, "a", "b")
    driver.send(m.ClientLeft("a"))
    prepare(driver, "c")
    assert group(driver) == []
    driver.advance(6)
    assert "a" not in driver.engine.state.ready
    prepare(driver, "d")
    assert group(driver) == ["b", "c", "d"]


def test_who_was_in_a_sum_that_may_be_known_is_a_group_however_few_they_are_of_a_buffer():
    driver = masked(size=4, clients="abcd", automatic=False)
    prepare(driver, "a", "b", "c", "d")
    upload(driver, "a", "b", "c")
    driver.send(m.ClientFailed(driver.step(), SiteFailure("d", 1, 1, "train", "node_failure", "lost")))
    driver.send(m.Unmasking(driver.step()), m.AggregationFailed(driver.step(), "shares are missing"))
    driver.finish_pending()
    prepare(driver, "d")
    assert sorted(driver.engine.state.at_work) == ["a", "b", "c"]
    prepare(driver, "a", "b", "c")
    assert group(driver) == ["a", "b", "c"]
