"""A deadline that follows the cohort: a quantile of what its clients took last, at most the stated one."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import make_plan
from roundtable.engine import messages as m

TABLE = """[cohort]
deadline = 100
deadline_percentile = 0.5
deadline_slack = 2.0
minimum = 1
[evaluation]
every = 0
"""


def test_the_deadline_is_learnt_from_the_first_round_and_time_in_line_is_no_work() -> None:
    driver = Driver(job(TABLE, rounds=3))
    driver.join("alder", "birch", "cedar")
    driver.send(m.Start())
    assert driver.instructions[-1].deadline == 100.0
    driver.send(m.WorkStarted("cedar", driver.step(), "queued"))
    driver.advance(5.0)
    driver.update("alder")
    driver.send(m.WorkStarted("cedar", driver.step()))
    driver.advance(10.0)
    driver.update("cedar")
    driver.advance(25.0)
    driver.update("birch")
    # They took 5, 10 and 40 s: twice the median from now on.
    assert driver.step() == m.Step(2, 1, m.TRAIN)
    assert {each.deadline for each in driver.instructions[-3:]} == {40.0 + 20.0}
    driver.restart()
    driver.update("alder")
    driver.update("cedar")
    driver.advance(31.0)
    assert driver.records[-1].contributors == ("alder", "cedar")
    started = [note.detail["seconds"] for note in driver.notes if note.kind == "round_started"]
    assert started[:2] == [100.0, 20.0]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ('[round]\nmode = "buffered"\nbuffer = 2\n', ConfigError),
        (
            '[aggregation]\nweighting = "uniform"\n[privacy]\nlevel = "client"\nclip_norm = 1.0\n'
            "delta = 1e-5\nnoise_multiplier = 1.0\n",
            PrivacyError,
        ),
    ],
)
def test_it_is_refused_where_nobody_is_asked_together_or_a_guarantee_would_depend_on_it(
    more: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match="deadline_percentile"):
        make_plan(parse_job(f'task = "t"\nrounds = 2\n{TABLE}{more}'), 10)


@pytest.mark.parametrize("strategy", ["oort", "power_of_choice"])
def test_losses_that_privacy_hides_choose_nobody(strategy: str) -> None:
    text = f"""task = "t"
rounds = 2
[cohort]
strategy = "{strategy}"
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client_local"
clip_norm = 1.0
delta = 1e-5
noise_multiplier = 1.0
"""
    with pytest.raises(PrivacyError, match="losses"):
        make_plan(parse_job(text), 10)
