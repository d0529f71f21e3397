"""Time in line at a silo: no deadline counts it, nobody is blamed for it, and it is bounded."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.observability.released import EVENTS, Tells
from roundtable.engine import messages as m

DEADLINE, MOST = 100.0, 60.0
COHORT = f"[cohort]\ndeadline = {DEADLINE}\nline = {MOST}\nminimum = 1\ngrace = 1\nretries = 0\n"
MODES = {"synchronous": "", "buffered": '[round]\nmode = "buffered"\nbuffer = 2\nconcurrency = 2\n'}
UNMEASURED = "[evaluation]\nevery = 0\n"


def begun(mode: str, text: str = UNMEASURED) -> Driver:
    """Both clients are asked in round 1, and `alder` has answered."""
    driver = Driver(job(COHORT + MODES[mode] + text, rounds=1))
    driver.join("alder", "birch")
    driver.send(m.Start())
    driver.update("alder")
    return driver


def says(driver: Driver, state: m.ClientState, step: m.Step | None = None) -> None:
    driver.send(m.WorkStarted("birch", step or driver.step(), state))


def faults(driver: Driver) -> list[str]:
    return [note.detail["kind"] for note in driver.notes if note.kind == "client_failed"]


def late_at(turns: list[tuple[int, bool]]) -> float:
    """Second by second: work runs while the client is not in line, and once it has stood there too long."""
    worked, stood, waits = 0, 0, False
    for second in range(1000):
        for at, turn in turns:
            if at == second:
                waits = turn
        if worked == DEADLINE:
            return second
        if waits and stood < MOST:
            stood += 1
        else:
            worked += 1
    raise AssertionError


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(st.tuples(st.integers(1, 250), st.booleans()), max_size=6, unique_by=lambda turn: turn[0]))
def test_a_client_is_late_when_its_own_work_has_had_the_deadline(
    mode: str, turns: list[tuple[int, bool]]
) -> None:
    driver, turns = begun(mode), sorted(turns)
    end = late_at(turns)
    for at, waits in turns:
        if at < end:
            driver.advance(at - driver.now)
            says(driver, "queued" if waits else "training", m.Step(1, 1, m.TRAIN))
    driver.advance(end - 0.5 - driver.now)
    assert faults(driver) == []
    driver.advance(1.0)
    waits = next((turn for at, turn in reversed(turns) if at < end), False)
    assert faults(driver) == ["busy" if waits else "slow_node"]
    assert driver.engine.state.clients["birch"].selected == (0 if waits else 1)
    driver.advance(5.0)
    assert [record.excused for record in driver.records] == [("birch",) if waits else ()]


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_in_between_forgets_no_time_in_line(mode: str) -> None:
    driver = begun(mode)
    driver.advance(10.0)
    says(driver, "queued")
    driver.advance(50.0)
    driver.restart()
    says(driver, "training")
    driver.advance(89.5)
    assert faults(driver) == []
    driver.advance(1.0)
    assert faults(driver) == ["slow_node"]


def test_whoever_did_not_stand_in_line_is_given_up_at_the_deadline_as_before() -> None:
    driver = Driver(job(COHORT + UNMEASURED, rounds=1))
    driver.join("alder", "birch", "cedar")
    driver.send(m.Start())
    driver.update("alder")
    says(driver, "queued")
    driver.advance(DEADLINE)
    assert [(each.client, each.step.phase) for each in driver.withdrawn] == [("cedar", m.TRAIN)]
    assert driver.engine.view().clients["birch"].state == "queued"
    says(driver, "training")
    driver.update("birch")
    assert driver.records[0].contributors == ("alder", "birch")


def test_an_evaluation_waits_for_those_in_line_and_not_for_ever() -> None:
    driver = begun("synchronous", "[evaluation]\nevery = 1\ndeadline = 20\n")
    driver.update("birch")
    says(driver, "queued")
    step = driver.step()
    driver.send(m.Evaluated("alder", step, {"loss": (1.0, 1)}))
    driver.advance(20.0 + MOST - 0.5)
    assert driver.records == []
    driver.advance(1.0)
    assert list(driver.records[0].evaluation) == ["loss"]
    assert [each.client for each in driver.withdrawn] == ["birch"]


def test_an_answer_tells_how_long_each_part_of_the_work_took() -> None:
    driver = Driver(job(COHORT + UNMEASURED, rounds=2))
    driver.join("alder", "birch")
    driver.send(m.Start())
    for state, seconds in (("queued", 3.0), ("training", 7.0), ("uploading", 20.0)):
        driver.advance(seconds)
        says(driver, state)
    driver.advance(1.0)
    driver.restart()
    driver.update("birch")
    driver.update("alder")

    def courses(round: int) -> dict[str, list[list[object]]]:
        notes = [note for note in driver.notes if note.kind in ("update_received", "client_failed")]
        return {note.client: note.detail["course"] for note in notes if note.round == round}

    whole = [["available", 3.0], ["queued", 7.0], ["training", 20.0], ["uploading", 1.0]]
    assert courses(1) == {"birch": whole, "alder": [["available", 31.0]]}
    # The next round's course begins anew; one that fails tells its own as well.
    driver.update("alder")
    says(driver, "training")
    driver.advance(DEADLINE)
    assert courses(2) == {"alder": [], "birch": [["training", DEADLINE]]}
    assert public_kinds("course") == {Tells.SILO}


def test_the_end_of_a_round_tells_how_long_its_model_was_measured_and_before() -> None:
    driver = begun("synchronous", "[evaluation]\nevery = 1\ndeadline = 20\n")
    driver.update("birch")
    says(driver, "evaluating")
    driver.advance(3.0)
    driver.send(m.Evaluated("birch", driver.step(), {"loss": (1.0, 1)}))
    driver.restart()
    driver.advance(2.0)
    driver.send(m.Evaluated("alder", driver.step(), {"loss": (1.0, 1)}))
    (told,) = (note.detail for note in driver.notes if note.kind == "round_committed")
    assert told["measured"] == {"birch": [5.0, 2.0]}
    assert public_kinds("measured") == {Tells.SILO}


def public_kinds(field: str) -> set[Tells]:
    """Of what kind a field of an event's detail is, over all events that have it."""
    return {kind.detail[field] for kind in EVENTS.values() if field in kind.detail}
