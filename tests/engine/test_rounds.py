"""Rounds as stories: who is asked, who answers, what happens when they do not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from engine_driver import Driver, job

from roundtable.core.errors import SiteFailure
from roundtable.engine import RoundEngine
from roundtable.engine import messages as m
from roundtable.engine.state import ClientRecord, from_plain

THREE = "[cohort]\nsize = 3\ndeadline = 60\n[evaluation]\nevery = 0\n"
PRIVATE = '[privacy]\nlevel = "client"\nclip_norm = 1.0\ndelta = 1e-5\nnoise_multiplier = 1.0\n'
MASKED = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n'


def started(text: str = THREE, rounds: int = 2, clients: str = "abc") -> Driver:
    driver = Driver(job(text, rounds))
    driver.join(*clients)
    driver.send(m.Start())
    return driver


def test_a_whole_job_in_order() -> None:
    driver = started(rounds=2)
    assert [i.client for i in driver.instructions] == ["a", "b", "c"]
    assert driver.instructions[0] == m.Instruct("a", m.Step(1, 1, "train"), "model-0", 60.0)
    for client in "cab":
        driver.update(client)
    assert driver.aggregates[0].updates == tuple(
        m.Update(c, m.BlobReference(f"{c}-1-1"), 10, 1.0, {"accuracy": (5.0, 10)}) for c in "abc"
    ), "updates are combined in the order of names, not of arrival"
    assert driver.instructions[3].model == "model-1"
    for client in "abc":
        driver.update(client)
    assert [record.round for record in driver.records] == [1, 2]
    assert driver.records[1].training == {"accuracy": (15.0, 30), "loss": (30.0, 30)}
    assert driver.statuses[-1] == m.StatusChanged("finished", "all 2 rounds are done")
    committed = [note for note in driver.notes if note.kind == "round_committed"]
    assert committed[0].detail["training"] == {"accuracy": 0.5, "loss": 1.0}
    assert driver.engine.view().model == "model-2"


def test_it_waits_for_the_cohort_and_says_for_how_many() -> None:
    driver = started(clients="a")
    assert driver.instructions == []
    waits, of = (
        "clients are available; waiting for more to connect; ",
        "have the task 't' in [tasks] of agent.toml",
    )
    assert driver.engine.view().waiting_for == f"1 of 3 {waits}1 silo that has come so far has {of[5:]}"
    driver.join("b")
    assert driver.instructions == []
    assert driver.engine.view().waiting_for == f"2 of 3 {waits}2 silos that have come so far {of}"
    driver.join("c")
    assert len(driver.instructions) == 3


def test_after_the_wait_it_starts_with_the_quorum() -> None:
    driver = started(clients="a")
    driver.advance(31)
    assert driver.instructions == []
    driver.join("b")
    assert [i.client for i in driver.instructions] == ["a", "b"]
    driver.update("a")
    driver.update("b")
    assert len(driver.records) == 1


def test_the_round_goes_on_at_the_deadline_with_a_quorum_and_names_who_was_late() -> None:
    driver = started()
    driver.update("a")
    driver.update("b")
    driver.advance(60)
    assert driver.records[0].failures == {"c": "no update before the deadline"}
    assert driver.records[0].contributors == ("a", "b")
    assert driver.withdrawn == [m.Withdraw("c", m.Step(1, 1, "train"), "the round's deadline has passed")]
    failed = next(note for note in driver.notes if note.kind == "client_failed")
    assert (failed.client, failed.detail["kind"]) == ("c", "slow_node")


def test_without_a_quorum_the_round_is_tried_again_and_at_last_paused() -> None:
    driver = started(THREE.replace("deadline = 60", "deadline = 60\nretries = 1"))
    driver.update("a")
    driver.advance(60)
    assert driver.step() == m.Step(1, 2, "train")
    driver.fail("a")
    driver.fail("b", detail="no disk")
    assert driver.statuses[-1].status == "paused"
    assert "a: it broke; b: no disk" in driver.statuses[-1].reason
    assert driver.engine.view().waiting_for == ""
    driver.send(m.Resume())
    assert driver.step() == m.Step(1, 3, "train"), "a resumed round never reuses an attempt's number"
    for client in "abc":
        driver.update(client)
    assert [record.attempt for record in driver.records] == [3]


def test_a_silo_with_another_model_ends_the_waiting_where_no_quorum_is_left() -> None:
    """Others would train in attempt after attempt for nothing; once it is mended the job goes on."""
    text = THREE.replace("deadline = 60", "minimum = 3\ndeadline = 60")
    driver = started(text)
    driver.fail("b", "model_mismatch", "the digest of its tokenizer is 1 here and 2 in the job")
    assert driver.statuses[-1].status == "paused"
    assert "b: the digest of its tokenizer is 1 here and 2 in the job" in driver.statuses[-1].reason
    assert {w.client for w in driver.withdrawn} == {"a", "c"}
    driver.send(m.Resume())
    for client in "abc":
        driver.update(client)
    assert [record.attempt for record in driver.records] == [2]
    spare = started(text, clients="abcd")
    first, *_ = asked = spare.cohort()
    (other,) = set("abcd") - set(asked)
    spare.fail(first, "model_mismatch")
    assert spare.instructions[-1].client == other, "somebody else can be asked"
    spare.fail(other, "model_mismatch")
    assert spare.statuses[-1].status == "paused"


def test_a_silo_with_another_model_is_not_asked_how_good_it_is() -> None:
    driver = started('[cohort]\nsize = 3\ndeadline = 60\n[evaluation]\nclients = "all"\n')
    driver.fail("c", "model_mismatch")
    driver.update("a")
    driver.update("b")
    assert [i.client for i in driver.instructions if i.step.phase == "evaluate"] == ["a", "b"]


def test_an_attempt_that_cannot_reach_its_quorum_fails_at_once() -> None:
    driver = started()
    driver.fail("a")
    assert driver.step().attempt == 1
    driver.fail("b")
    assert driver.step() == m.Step(1, 2, "train")
    assert ("c", m.Step(1, 1, "train")) in [(w.client, w.step) for w in driver.withdrawn]


def test_over_selection_takes_the_first_and_withdraws_the_rest() -> None:
    driver = started("[cohort]\nsize = 2\nover_selection = 1.5\n[evaluation]\nevery = 0\n")
    assert len(driver.cohort()) == 3
    driver.update("c")
    driver.update("a")
    assert driver.records[0].contributors == ("a", "c")
    assert [w.client for w in driver.withdrawn] == ["b"]


def test_late_doubled_and_foreign_updates_change_nothing() -> None:
    driver = started()
    driver.automatic = False
    driver.update("a")
    driver.update("a", examples=99)
    driver.update("z")
    driver.update("b", step=m.Step(7, 1, "train"))
    assert {u: v.examples for u, v in driver.engine.state.attempt.updates.items()} == {"a": 10}
    first = driver.step()
    assert driver.engine.wants("a", first) == "duplicate"
    assert driver.engine.wants("b", first) == "wanted"
    assert driver.engine.wants("z", first) == "stale"
    driver.update("b")
    driver.update("c")
    driver.automatic = True
    driver.finish_pending()
    assert driver.engine.wants("a", first) == "stale"


def test_metrics_for_a_step_of_training_are_no_answer_to_it() -> None:
    driver = started()
    driver.send(m.Evaluated("a", driver.step(), {"accuracy": (1.0, 1)}))
    assert list(driver.engine.state.attempt.awaited) == ["a", "b", "c"]


def test_a_client_that_went_away_can_come_back_and_deliver() -> None:
    driver = started()
    driver.send(m.ClientLeft("c"))
    assert driver.engine.view().clients["c"].state == "offline"
    before = len(driver.instructions)
    driver.join("c")
    assert driver.instructions[before:] == [m.Instruct("c", m.Step(1, 1, "train"), "model-0", 60.0)]
    for client in "abc":
        driver.update(client)
    assert len(driver.records) == 1


def test_with_a_quorum_those_offline_are_waited_for_no_longer_than_the_grace() -> None:
    driver = started(THREE.replace("deadline = 60", "deadline = 6000"))
    driver.send(m.ClientLeft("c"))
    driver.update("a")
    driver.update("b")
    driver.advance(29)
    assert driver.records == []
    driver.advance(2)
    assert driver.records[0].failures == {"c": "still offline after the grace time"}


def test_the_grace_does_not_hurt_who_came_back() -> None:
    driver = started(THREE.replace("deadline = 60", "deadline = 6000"))
    driver.send(m.ClientLeft("c"))
    driver.update("a")
    driver.update("b")
    driver.join("c")
    driver.advance(100)
    assert driver.records == []
    driver.update("c")
    assert driver.records[0].contributors == ("a", "b", "c")


def test_evaluation_goes_to_all_and_its_deadline_leaves_out_who_is_late() -> None:
    driver = started("[cohort]\nsize = 2\n[evaluation]\ndeadline = 5\n", rounds=1)
    for client in driver.cohort():
        driver.update(client)
    asked = [i for i in driver.instructions if i.step.phase == "evaluate"]
    assert [(i.client, i.model) for i in asked] == [("a", "model-1"), ("b", "model-1"), ("c", "model-1")]
    driver.evaluate("a", 8.0, 10)
    driver.evaluate("b", 1.0, 2)
    driver.evaluate("b", 1.0, 2)
    driver.fail("nobody")
    driver.advance(6)
    assert driver.records[0].evaluation == {"accuracy": (9.0, 12)}
    assert list(driver.records[0].client_metrics) == ["a", "b"]


def test_a_failed_evaluation_does_not_hold_the_round() -> None:
    driver = started("[cohort]\nsize = 3\n", rounds=1)
    for client in "abc":
        driver.update(client)
    driver.evaluate("a")
    driver.fail("b")
    driver.evaluate("c")
    assert driver.records[0].evaluation == {"accuracy": (16.0, 20)}
    assert driver.records[0].failures == {}


def test_aggregation_that_fails_is_an_attempt_that_fails() -> None:
    driver = started()
    driver.automatic = False
    for client in "abc":
        driver.update(client)
    driver.send(m.AggregationFailed(m.Step(1, 1, "aggregate"), "two of three were NaN"))
    assert driver.step() == m.Step(1, 2, "train")
    assert "two of three were NaN" in driver.notes[-2].message or driver.kinds().count("attempt_failed") == 1


@pytest.mark.parametrize(
    ("table", "values", "rounds", "reason"),
    [
        ('metric = "accuracy"\ntarget = 0.9', [0.5, 0.9, 1.0], 2, "accuracy reached 0.9; the target was 0.9"),
        ('metric = "accuracy"\npatience = 2', [0.5, 0.5, 0.4, 0.9], 3, "not improved for 2 evaluations"),
        ('metric = "error"\ntarget = 0.2', [0.5, 0.1], 2, "error reached 0.1"),
        ('time = "10s"', [0.5, 0.5, 0.5], 2, "the time of 10 s has passed"),
    ],
)
def test_stop_rules(table: str, values: list[float], rounds: int, reason: str) -> None:
    driver = started(f"[cohort]\nsize = 1\n[stop]\n{table}\n", rounds=9, clients="a")
    for value in values:
        if driver.engine.state.status == "finished":
            break
        driver.advance(5)
        driver.update("a")
        driver.send(m.Evaluated("a", driver.step(), {"accuracy": (value, 1), "error": (value, 1)}))
    assert len(driver.records) == rounds
    assert driver.statuses[-1].status == "finished"
    assert reason in driver.statuses[-1].reason


@pytest.mark.parametrize(("every", "warned"), [(1, [1]), (2, [2])])
def test_a_metric_to_stop_by_that_nobody_measures_is_warned_of_once(every: int, warned: list[int]) -> None:
    """A slip of the pen in stop.metric must not silently train all rounds."""
    tables = f'[cohort]\nsize = 1\n[evaluation]\nevery = {every}\n[stop]\nmetric = "acuracy"\ntarget = 0.5\n'
    driver = started(tables, rounds=4, clients="a")
    while driver.engine.state.status != "finished":
        driver.update("a")
        if driver.engine.state.attempt and driver.engine.state.attempt.phase == m.EVALUATE:
            driver.send(m.Evaluated("a", driver.step(), {"accuracy": (1.0, 1), "loss": (0.1, 1)}))
    notes = [note for note in driver.notes if note.kind == "metric_missing"]
    assert [note.round for note in notes] == warned
    assert "'acuracy' is not among what the silos measure (accuracy, loss)" in notes[0].message
    assert len(driver.records) == 4


def test_cancel_withdraws_and_ends() -> None:
    driver = started()
    driver.send(m.Cancel("operator ana asked for it"))
    assert driver.statuses[-1] == m.StatusChanged("cancelled", "operator ana asked for it")
    assert sorted(w.client for w in driver.withdrawn) == ["a", "b", "c"]
    before = len(driver.statuses)
    driver.send(m.Resume(), m.Pause("no"), m.Cancel("again"), m.DeadlinePassed("deadline:1.1.train"))
    driver.update("a", step=m.Step(1, 1, "train"))
    assert len(driver.statuses) == before


def test_privacy_is_authorised_before_anything_is_asked_and_a_denial_ends_the_job() -> None:
    text = THREE + PRIVATE
    driver = Driver(job(text), automatic=False)
    driver.join(*"abc")
    driver.send(m.Start())
    assert driver.instructions == []
    assert driver.pending == [m.Authorize(m.Step(1, 1, "authorize"))]
    driver.finish_pending()
    assert len(driver.instructions) == 3
    driver.automatic = False
    for client in "abc":
        driver.update(client)
    driver.pending.clear()
    driver.send(m.Aggregated(m.Step(1, 1, "aggregate"), "model-1"), m.Committed(1))
    assert driver.step() == m.Step(2, 1, "authorize")
    driver.send(m.Denied(m.Step(2, 1, "authorize"), "epsilon would be 1.1 of 1"))
    assert driver.statuses[-1] == m.StatusChanged("finished", "epsilon would be 1.1 of 1")


def test_poisson_cohorts_come_from_all_that_are_known_and_may_be_empty() -> None:
    text = '[cohort]\nstrategy = "poisson"\nprobability = 1e-9\n[evaluation]\nevery = 0\n'
    driver = Driver(job(text, rounds=3))
    driver.send(m.ClientJoined(m.ClientInfo("a"), online=False), m.Start())
    assert driver.step().phase == m.SELECT, "with nobody there, nothing is drawn"
    driver.join("b")
    assert [record.cohort for record in driver.records] == [(), (), ()]
    all_of_them = Driver(job(text.replace("1e-9", "1.0"), rounds=1))
    all_of_them.send(m.ClientJoined(m.ClientInfo("a"), online=False))
    all_of_them.join("b")
    all_of_them.send(m.Start())
    assert all_of_them.cohort() == ("a", "b")
    assert [i.client for i in all_of_them.instructions] == ["b"]
    all_of_them.update("b")
    all_of_them.advance(31)
    assert all_of_them.records[0].failures == {"a": "still offline after the grace time"}


def test_amplified_uniform_sampling_draws_from_the_population_not_from_who_is_there() -> None:
    text = THREE.replace("size = 3", "size = 2") + PRIVATE
    seen: set[str] = set()
    driver = Driver(job(text, rounds=12))
    driver.send(*(m.ClientJoined(m.ClientInfo(n), online=n < "c") for n in "abcd"), m.Start())
    while driver.engine.state.status == "running":
        seen.update(driver.cohort())
        for name in driver.cohort():
            driver.fail(name) if name >= "c" else driver.update(name)
    assert seen == set("abcd")


def test_a_restart_in_training_keeps_updates_and_asks_the_rest_again() -> None:
    driver = started()
    driver.update("b")
    driver.now = 50
    driver.instructions.clear()
    driver.restart()
    assert [i.client for i in driver.instructions] == ["a", "c"]
    assert driver.timers["deadline:1.1.train"] == 80, "agents get the grace time to find their way back"
    driver.update("a")
    driver.update("c")
    assert driver.records[0].contributors == ("a", "b", "c")


def test_a_restart_while_waiting_for_clients_waits_no_longer_than_the_job_says() -> None:
    driver = Driver(job("[cohort]\nsize = 3\nminimum = 2\nwait = 60"))
    driver.join("a", "b")
    driver.send(m.Start())
    driver.restart()
    assert driver.engine.state.status == "waiting"
    driver.advance(60)
    assert driver.cohort() == ("a", "b")


def test_a_clock_set_back_during_a_restart_puts_no_deadline_off() -> None:
    driver = started()
    driver.now -= 86400
    driver.restart()
    assert driver.timers["deadline:1.1.train"] == driver.now + driver.job.cohort.deadline


def test_a_restart_with_a_quorum_waits_for_those_offline_no_longer_than_the_grace() -> None:
    driver = Driver(job("[cohort]\nsize = 3\nminimum = 2\ngrace = 30\n[evaluation]\nevery = 0"))
    driver.join("a", "b", "c")
    driver.send(m.Start())
    driver.update("a")
    driver.update("b")
    driver.send(m.ClientLeft("c"))
    snapshot = driver.engine.snapshot()
    driver.engine = RoundEngine.restore(driver.job, snapshot, [])
    driver.timers.clear()
    driver._perform(driver.engine.outstanding(driver.now))
    driver.advance(30)
    assert driver.records[0].contributors == ("a", "b")


def test_after_a_restart_those_who_delivered_are_awaited_for_the_evaluation() -> None:
    driver = Driver(job("[cohort]\nsize = 3"))
    driver.join("a", "b", "c")
    driver.send(m.Start())
    driver.automatic = False
    for name in "abc":
        driver.update(name)
    snapshot, waiting = driver.engine.snapshot(), driver.pending
    driver.engine = RoundEngine.restore(driver.job, snapshot, [])
    driver.pending, driver.automatic = waiting, True
    driver.finish_pending()
    assert driver.records == [], "nobody is online, and all are on their way back"
    driver.join("a", "b")
    driver.evaluate("a")
    driver.evaluate("b")
    driver.advance(driver.job.cohort.grace)
    assert sorted(driver.records[0].client_metrics) == ["a", "b"]


def test_failures_carry_site_round_and_phase() -> None:
    failure = SiteFailure("hospital-1", 3, 2, "train", "out_of_memory", "the worker was killed")
    assert str(failure) == "hospital-1 failed in round 3, attempt 2, train: the worker was killed"


@pytest.mark.parametrize("event", [m.Pause("lunch"), m.Cancel("enough")])
def test_a_stop_during_a_commit_waits_for_it(event: m.Event) -> None:
    driver = started()
    driver.automatic = False
    for client in "abc":
        driver.update(client)
    driver.pending.clear()
    driver.send(m.Aggregated(m.Step(1, 1, "aggregate"), "model-1"))
    driver.send(event)
    assert driver.statuses[-1].status == "running"
    driver.finish_pending()
    assert [record.round for record in driver.records] == [1]
    assert driver.statuses[-1].status in ("paused", "cancelled")
    driver.send(m.Resume())
    if isinstance(event, m.Pause):
        assert driver.step() == m.Step(2, 1, "train")


def test_training_metrics_that_only_the_aggregate_tells_are_recorded() -> None:
    driver = Driver(job(), automatic=False)
    driver.join("a", "b")
    driver.send(m.Start())
    assert driver.instructions[0].cohort == ("a", "b")
    step = m.Step(1, 1, "train")
    driver.send(*(m.UpdateArrived(step, m.Update(name, m.BlobReference(f"d-{name}"), 0)) for name in "ab"))
    driver.restart()
    done = m.Aggregated(m.Step(1, 1, "aggregate"), "model-1", training={"loss": (6.0, 4)})
    driver.send(done)
    driver.restart()
    assert driver.engine.state.attempt is not None
    assert driver.engine.state.attempt.aggregated == done


def test_without_noise_nobody_is_drawn_who_is_not_there() -> None:
    driver = Driver(job(MASKED + "[cohort]\nsize = 3"))
    driver.join("a", "b", "c", "d")
    driver.send(m.ClientLeft("a"))
    driver.send(m.Start())
    assert [action.client for action in driver.instructions] == ["b", "c", "d"]


def test_a_secure_round_waits_for_three_and_fails_below_its_threshold() -> None:
    driver = Driver(job(MASKED + "[cohort]\nwait = 5"))
    driver.join("a", "b")
    driver.send(m.Start())
    driver.advance(10.0)
    assert driver.engine.view().waiting_for.startswith("2 of 3 clients are available")
    driver.join("c")
    assert driver.engine.state.attempt is not None
    assert driver.engine.state.attempt.minimum == 3


def test_a_snapshot_is_all_of_the_state_but_its_chronicle() -> None:
    driver = started(rounds=3)
    for name in "abc":
        driver.update(name)
    driver.update("a")
    driver.fail("b")
    state = driver.engine.state
    expected = asdict(state)
    assert expected.pop("summary")["done"] == 1
    snapshot = driver.engine.snapshot()
    never_asked = asdict(ClientRecord())
    told = {name: never_asked | record for name, record in snapshot["clients"].items()}
    assert json.loads(json.dumps({**snapshot, "clients": told})) == json.loads(json.dumps(expected))
    assert replace(from_plain(json.loads(json.dumps(snapshot))), summary=state.summary) == state
