"""Updates that were accepted and are damaged when they are to be combined, as stories."""

from __future__ import annotations

from engine_driver import Driver, job

from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m

THREE = "[cohort]\nsize = 3\ndeadline = 60\ngrace = 10\n[evaluation]\nevery = 0\n"


def delivered(text: str = THREE) -> Driver:
    """All three have delivered, and their updates are about to be combined."""
    driver = Driver(job(text, rounds=1))
    driver.join(*"abc")
    driver.send(m.Start())
    driver.automatic = False
    for client in "abc":
        driver.update(client)
    return driver


def damage(driver: Driver, *clients: str) -> None:
    action = driver.pending.pop(0)
    assert isinstance(action, m.Aggregate)
    driver.send(m.AggregationFailed(action.step, "damaged", dict.fromkeys(clients, "its bytes are wrong")))


def test_it_is_sent_again_and_counts_once() -> None:
    driver = delivered()
    train = m.Step(1, 1, "train")
    damage(driver, "b")
    assert driver.instructions[3:] == [m.Instruct("b", train, "model-0", 60.0)]
    assert (driver.engine.wants("a", train), driver.engine.wants("b", train)) == ("duplicate", "wanted")
    assert driver.engine.lost("b", train) == m.Update(
        "b", m.BlobReference("b-1-1"), 10, 1.0, {"accuracy": (5.0, 10)}
    )
    assert driver.engine.lost("a", train) is None
    driver.restart()
    driver.update("b", examples=99)
    first, again = driver.aggregates
    assert again.updates == first.updates
    driver.finish_pending()
    assert driver.records[0].contributors == ("a", "b", "c")
    assert [driver.engine.state.clients[name].completed for name in "abc"] == [1, 1, 1]
    (note,) = [note for note in driver.notes if note.kind == "client_troubled"]
    assert note.client == "b"
    assert note.detail["action"] == "asked the silo to send it again"
    assert "b delivered its update again" in [note.message for note in driver.notes]


def test_after_two_more_times_the_round_goes_on_without_it() -> None:
    driver = delivered()
    for _ in range(2):
        damage(driver, "b")
        driver.update("b")
    damage(driver, "b")
    assert [update.client for update in driver.aggregates[-1].updates] == ["a", "c"]
    driver.finish_pending()
    assert driver.records[0].contributors == ("a", "c")
    assert driver.records[0].failures == {"b": "its bytes are wrong"}
    (note,) = [note for note in driver.notes if note.kind == "client_failed"]
    assert note.detail["kind"] == "data_corruption"
    assert note.detail["action"] == "asked the silo 2 times to send it again, then excluded the update"


def test_who_does_not_send_it_again_in_time_is_left_out() -> None:
    driver = delivered()
    driver.advance(55)
    damage(driver, "b", "c")
    driver.update("c")
    driver.advance(9)
    assert len(driver.aggregates) == 1
    driver.advance(1)
    assert [update.client for update in driver.aggregates[-1].updates] == ["a", "c"]
    (note,) = [note for note in driver.notes if note.kind == "client_failed"]
    assert note.detail["kind"] == "data_corruption"
    assert "not sent again: no update before the deadline" in note.message


def test_without_a_quorum_the_attempt_fails() -> None:
    driver = delivered()
    damage(driver, "a", "b")
    driver.fail("a")
    driver.fail("b")
    assert driver.engine.state.attempt is not None
    assert driver.engine.state.attempt.number == 2
    assert driver.engine.state.attempt.lost == {}


def test_a_buffered_round_fills_again_without_it() -> None:
    text = '[round]\nmode = "buffered"\nbuffer = 2\nconcurrency = 2\n[evaluation]\nevery = 0\n'
    driver = Driver(job(text, rounds=1), automatic=False)
    driver.join(*"abc")
    driver.send(m.Start())
    at_work = list(driver.engine.state.at_work)
    for client in at_work:
        driver.update(client, m.Step(1, 1, "train"))
    damage(driver, at_work[0])
    third = next(name for name in "abc" if name not in at_work)
    driver.update(third, m.Step(1, 1, "train"))
    assert {update.client for update in driver.aggregates[-1].updates} == {at_work[1], third}
    assert "its bytes are wrong" in next(
        note.message for note in driver.notes if note.kind == "client_failed"
    )


def test_troubles_that_silos_deal_with_are_noted_but_not_for_ever() -> None:
    driver = Driver(job(THREE, rounds=1))
    driver.join(*"abc")
    driver.send(m.Start())
    step = driver.step()
    failure = SiteFailure("a", 1, 1, "train", "out_of_memory", "it was too much")
    for _ in range(20):
        driver.send(m.Troubled(step, failure, "reduced the batch size"))
    driver.send(m.Troubled(m.Step(1, 2, "train"), failure, "reduced the batch size"))
    notes = [note for note in driver.notes if note.kind == "client_troubled"]
    assert len(notes) == 8
    assert notes[0].message == "a, train: it was too much; reduced the batch size"
    assert notes[0].detail == {"kind": "out_of_memory", "phase": "train", "action": "reduced the batch size"}
    assert "a" in driver.engine.state.attempt.awaited  # type: ignore[union-attr]
