"""A round that fails too often: the job pauses, or goes on with the next one; how severe its failures are."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job

from roundtable.core import parse_job
from roundtable.core.errors import PrivacyError
from roundtable.engine import make_plan
from roundtable.engine import messages as m

SKIP = '[cohort]\nminimum = 2\nretries = 1\non_failure = "skip"\n[evaluation]\nevery = 0\n'


@pytest.mark.parametrize("mode", ["", '[round]\nmode = "buffered"\nbuffer = 2\n'])
def test_the_next_round_begins_with_the_same_model_also_after_a_restart(mode: str) -> None:
    driver = Driver(job(SKIP + mode, rounds=3), automatic=False)
    driver.join("alder", "birch")
    driver.send(m.Start())
    for attempt in (1, 2):
        assert driver.step() == m.Step(1, attempt, m.TRAIN)
        driver.fail("alder")
        if driver.step() == m.Step(1, attempt, m.TRAIN):
            driver.fail("birch")
    (skipped,) = [action.record for action in driver.pending if isinstance(action, m.Commit)]
    assert (skipped.round, skipped.attempt, skipped.model, skipped.contributors) == (1, 2, "model-0", ())
    assert "alder" in skipped.closed
    driver.restart()
    driver.automatic = True
    driver.finish_pending()
    assert driver.step() == m.Step(2, 1, m.TRAIN)
    for _ in range(2):
        driver.update("alder")
        driver.update("birch")
    assert [record.model for record in driver.records] == ["model-0", "model-2", "model-3"]
    assert driver.statuses[-1].status == "finished"
    assert driver.statuses[-1].reason == "all 3 rounds are done, 1 of them without a model"
    assert "round_skipped" in driver.kinds()


def test_a_job_all_of_whose_rounds_are_skipped_has_failed() -> None:
    driver = Driver(job(SKIP.replace("retries = 1", "retries = 0"), rounds=2))
    driver.join("alder", "birch")
    driver.send(m.Start())
    driver.fail("alder")
    driver.fail("alder")
    assert driver.statuses[-1].status == "failed"


def test_noise_that_is_planned_over_all_rounds_refuses_to_skip_one() -> None:
    table = """
task = "t"
rounds = 3
[cohort]
on_failure = "skip"
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "LEVEL"
clip_norm = 1.0
delta = 1e-5
noise_multiplier = 1.0
"""
    with pytest.raises(PrivacyError, match="on_failure"):
        make_plan(parse_job(table.replace("LEVEL", "client")), 10)
    make_plan(parse_job(table.replace("LEVEL", "client_local")), 10)


def test_failures_tell_how_many_silos_fail_how_often_and_what_is_left_of_the_quorum() -> None:
    driver = Driver(job("[cohort]\nminimum = 2\n[evaluation]\nevery = 0\n", rounds=2))
    driver.join("alder", "birch", "cedar", "elder")
    driver.send(m.Start())
    driver.fail("alder")
    driver.fail("birch")
    driver.update("cedar")
    driver.update("elder")
    driver.fail("alder")
    found = [note.detail for note in driver.notes if note.kind == "client_failed"]
    names = ("failed", "cohort", "spare", "on_end")
    assert [tuple(detail[name] for name in names) for detail in found] == [
        (1, 4, 1, 1),
        (2, 4, 0, 1),
        (1, 4, 1, 2),
    ]
