"""Another client in the place of one that fails: who, until when, and where nobody may be asked."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job

from roundtable.engine import messages as m

COHORT = '[cohort]\nsize = 2\nminimum = 1\ndeadline = 60\nstrategy = "round_robin"\n'
EVALUATION = "[evaluation]\nevery = 0\n"


def started(clients: str, cohort: str = COHORT, more: str = "") -> Driver:
    driver = Driver(job(cohort + more + EVALUATION, 3))
    driver.join(*clients)
    driver.send(m.Start())
    return driver


def replaced(driver: Driver) -> list[tuple[str, str]]:
    return [(n.client, n.detail["replacement"]) for n in driver.notes if n.kind == "client_replaced"]


def action(driver: Driver) -> str | None:
    """What the last failure's event says was done about it."""
    return [note for note in driver.notes if note.kind == "client_failed"][-1].detail.get("action")


def test_another_client_trains_within_the_same_attempt_and_deadline() -> None:
    driver = started("abc")
    step = driver.step()
    driver.advance(20)
    driver.fail("a")
    assert replaced(driver) == [("a", "c")]
    assert action(driver) == "asked c in its place"
    assert driver.instructions[-1] == m.Instruct("c", step, "model-0", 60.0)
    assert driver.engine.wants("a", step) == "stale"
    assert driver.engine.refusal("a", step).endswith("an update of a: c was asked in its place")
    driver.update("a")
    driver.update("b")
    assert driver.records == [], "the update of the client that failed is not combined"
    driver.update("c")
    (record,) = driver.records
    assert (record.attempt, record.cohort, record.contributors) == (1, ("a", "b", "c"), ("b", "c"))
    assert record.failures == {"a": "it broke"}
    assert driver.engine.state.clients["c"].last_round == 1


def test_a_replacement_is_replaced_but_a_task_that_fails_everywhere_asks_few() -> None:
    driver = started("abcdefgh")
    for name in "abc":
        driver.fail(name)
    assert replaced(driver) == [("a", "c"), ("b", "d")], "as many as updates are wanted, and no more"
    driver.update("d")
    assert driver.records[0].contributors == ("d",)


def test_who_was_selected_beyond_the_number_wanted_takes_the_first_place() -> None:
    driver = started("abcde", COHORT + "over_selection = 1.5\n")
    driver.fail("a")
    assert replaced(driver) == []
    driver.fail("b")
    assert replaced(driver) == [("b", "d")]


def test_a_client_that_comes_later_takes_the_place_also_after_a_restart() -> None:
    driver = started("abcd", COHORT.replace("size = 2", "size = 4"))
    driver.fail("a")
    assert replaced(driver) == []
    driver.restart()
    driver.join("a")
    assert replaced(driver) == [], "who has failed is not asked again in the attempt"
    driver.join("e")
    driver.restart()
    assert driver.engine.state.attempt is not None
    assert driver.engine.state.attempt.replacements == {"a": "e"}
    for name in "bcde":
        driver.update(name)
    assert driver.records[0].contributors == ("b", "c", "d", "e")


def test_a_client_whose_update_stays_damaged_is_replaced() -> None:
    driver = started("abc")
    driver.automatic = False
    for _ in range(3):
        driver.update("a")
        driver.update("b")
        driver.send(m.AggregationFailed(driver.step(), "rotten", {"a": "rotten"}))
        assert driver.step().phase == m.TRAIN
    assert replaced(driver) == [("a", "c")]
    driver.update("c")
    driver.automatic = True
    driver.finish_pending()
    assert driver.records[0].contributors == ("b", "c")


def test_nobody_is_asked_at_the_deadline_or_in_an_evaluation() -> None:
    driver = Driver(job(COHORT + '[evaluation]\nclients = "cohort"\n', 1))
    driver.join(*"abc")
    driver.send(m.Start())
    driver.update("a")
    driver.advance(60)
    assert driver.step().phase == m.EVALUATE
    driver.fail("a")
    assert replaced(driver) == []


LEVEL = """[privacy]
level = "{}"
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-6
"""


@pytest.mark.parametrize(
    ("cohort", "privacy", "reason"),
    [
        ('[cohort]\nstrategy = "poisson"\nprobability = 0.5\n', "", "draws each client by itself"),
        (COHORT.replace("round_robin", "uniform"), LEVEL.format("client"), "one term of the sum only"),
        (COHORT, LEVEL.format("client"), "one term of the sum only"),
        (
            COHORT.replace("size = 2", "size = 8"),
            '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n',
            "agreed upon the masks",
        ),
    ],
)
def test_where_the_draw_or_the_sum_rests_on_it_the_event_says_why_nobody_is_asked(
    cohort: str, privacy: str, reason: str
) -> None:
    driver = started("abcdefghij", cohort, privacy)
    before = driver.cohort()
    driver.fail(before[0])
    assert replaced(driver) == []
    assert driver.cohort() == before
    assert reason in (action(driver) or "")


def test_where_each_silo_has_its_own_account_another_is_asked() -> None:
    driver = started("abc", more=LEVEL.format("client_local"))
    driver.fail("a")
    assert replaced(driver) == [("a", "c")]
