"""Buffered rounds: clients at work beside rounds, staleness, refusals, restarts."""

from __future__ import annotations

import pytest
from engine_driver import Driver, job

from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import messages as m
from roundtable.engine.validation.round_noise import SiloNoise

NAMES = ("a", "b", "c", "d")


def buffered(size=2, concurrency=3, stale=10, rounds=3, every=0, cohort="", **more):
    lines = ["[round]", 'mode = "buffered"', f"buffer = {size}", f"max_staleness = {stale}"]
    lines += [f"concurrency = {concurrency}"] if concurrency else []
    lines += ["[cohort]", cohort] if cohort else []
    lines += ["[evaluation]", f"every = {every}"]
    driver = Driver(job("\n".join(lines), rounds=rounds), **more)
    driver.send(m.Start())
    return driver


def work(driver, name):
    """The step that a client is at work on."""
    return driver.engine.state.at_work[name].step


def deliver(driver, *names):
    for name in names:
        driver.update(name, work(driver, name))


def at_work(driver):
    return sorted(driver.engine.state.at_work)


def test_so_many_are_at_work_and_each_answer_asks_another():
    driver = buffered(concurrency=2)
    driver.join(*NAMES)
    assert len(at_work(driver)) == 2
    first = at_work(driver)[0]
    deliver(driver, first)
    assert len(at_work(driver)) == 2
    assert first not in at_work(driver)
    assert driver.records == []


def test_the_full_buffer_makes_a_model_and_the_slow_go_on():
    driver = buffered(size=2, concurrency=4)
    driver.join(*NAMES)
    deliver(driver, "a", "b")
    assert [record.contributors for record in driver.records] == [("a", "b")]
    assert work(driver, "a").round == work(driver, "b").round == 2
    assert work(driver, "c").round == 1
    asked = {i.client: i.model for i in driver.instructions}
    assert asked == {"a": "model-1", "b": "model-1", "c": "model-0", "d": "model-0"}
    deliver(driver, "a", "c")
    record = driver.records[1]
    assert record.staleness == {"a": 0, "c": 1}
    assert [update.asked for update in driver.aggregates[1].updates] == [(2, 1), (1, 1)]
    assert [update.staleness(2) for update in driver.aggregates[1].updates] == [0, 1]


def test_what_comes_while_a_model_is_made_enters_the_next():
    driver = buffered(size=2, concurrency=4, automatic=False)
    driver.join(*NAMES)
    deliver(driver, "a", "b", "c", "d")
    assert [update.client for update in driver.aggregates[0].updates] == ["a", "b"]
    driver.finish_pending()
    assert [record.contributors for record in driver.records] == [("a", "b"), ("c", "d")]
    assert driver.records[1].staleness == {"c": 1, "d": 1}


def test_who_is_too_stale_is_told_to_stop_and_asked_anew():
    driver = buffered(size=1, concurrency=2, stale=1, rounds=9)
    driver.join("a", "b")
    old = work(driver, "b")
    deliver(driver, "a")
    assert driver.withdrawn == []
    deliver(driver, "a")
    assert [(w.client, w.step) for w in driver.withdrawn] == [("b", old)]
    assert "its model is 2 rounds old in round 3; round.max_staleness = 1" in driver.withdrawn[0].reason
    assert "rounds old" in driver.records[1].failures["b"]
    assert driver.engine.wants("b", old) == "stale"
    assert "2 rounds old" in driver.engine.refusal("b", old)
    driver.update("b", old)
    assert len(driver.records) == 2
    assert work(driver, "b").round == 3


def test_doubled_foreign_and_late_updates_change_nothing():
    driver = buffered(size=3, concurrency=3)
    driver.join(*NAMES)
    busy = at_work(driver)
    step = work(driver, busy[0])
    deliver(driver, busy[0])
    assert driver.engine.wants(busy[0], step) == "duplicate"
    before = driver.engine.snapshot()
    driver.update(busy[0], step)
    driver.update("nobody", step)
    driver.update(busy[1], m.Step(7, 1, "train"))
    assert driver.engine.snapshot() == before


def test_a_client_that_leaves_makes_room_and_may_still_deliver():
    driver = buffered(size=2, concurrency=2)
    driver.join("a", "b", "c")
    gone = at_work(driver)[0]
    step = work(driver, gone)
    driver.send(m.ClientLeft(gone))
    assert len(at_work(driver)) == 3
    driver.update(gone, step)
    assert len(driver.engine.state.attempt.updates) == 1
    driver.instructions.clear()
    driver.send(m.ClientLeft(at_work(driver)[0]))
    back = next(n for n, given in driver.engine.state.at_work.items() if given.away)
    driver.join(back)
    assert [i.step for i in driver.instructions if i.client == back] == [work(driver, back)]


def test_the_deadline_is_each_clients_own():
    driver = buffered(size=2, concurrency=2, cohort="deadline = 20\nminimum = 1", rounds=2)
    driver.join("a")
    driver.advance(15)
    driver.join("b")
    driver.advance(10)
    assert at_work(driver) == ["b"]
    assert driver.engine.state.attempt.failures["a"].detail == "no update before the deadline"
    deliver(driver, "b")
    driver.advance(29)
    assert driver.records == []
    driver.advance(2)
    assert [record.contributors for record in driver.records] == [("b",)]
    assert driver.records[0].failures == {"a": "no update before the deadline"}


def test_a_quorum_is_enough_once_nobody_else_is_there():
    driver = buffered(size=4, concurrency=None, cohort="grace = 5")
    driver.join("a", "b", "c")
    deliver(driver, "a", "b", "c")
    assert driver.records == []
    driver.advance(5)
    assert [record.contributors for record in driver.records] == [("a", "b", "c")]


def test_the_grace_time_does_not_cut_off_a_client_that_came_meanwhile():
    driver = buffered(size=4, concurrency=None, cohort="grace = 5")
    driver.join("a", "b", "c")
    deliver(driver, "a", "b", "c")
    driver.join("d")
    driver.advance(60)
    assert driver.records == []
    deliver(driver, "d")
    assert [record.contributors for record in driver.records] == [("a", "b", "c", "d")]


def test_clients_that_all_fail_are_asked_again_and_then_the_job_pauses():
    driver = buffered(size=2, concurrency=None, cohort="retries = 1")
    driver.join("a", "b")
    for attempt in (1, 2):
        for name in ("a", "b"):
            step = work(driver, name)
            assert step.attempt == attempt
            failure = m.SiteFailure(name, step.round, step.attempt, "train", "task_error", "it broke")
            driver.send(m.ClientFailed(step, failure))
    assert driver.engine.state.status == "paused"
    assert "it broke" in driver.engine.state.reason
    driver.send(m.Resume())
    deliver(driver, "a", "b")
    assert len(driver.records) == 1


def test_a_good_update_survives_another_attempt():
    driver = buffered(size=2, concurrency=None)
    driver.join("a", "b")
    deliver(driver, "a")
    step = work(driver, "b")
    driver.send(m.ClientFailed(step, m.SiteFailure("b", 1, 1, "train", "task_error", "x")))
    assert driver.step().attempt == 2
    deliver(driver, "b")
    assert driver.records[0].contributors == ("a", "b")


def test_what_cannot_be_combined_is_dropped_and_asked_for_again():
    driver = buffered(size=2, concurrency=None, automatic=False)
    driver.join("a", "b")
    deliver(driver, "a", "b")
    driver.send(m.AggregationFailed(driver.pending.pop().step, "no"))
    assert driver.step() == m.Step(1, 2, "train")
    deliver(driver, "a", "b")
    driver.finish_pending()
    assert driver.records[0].attempt == 2


def test_only_the_idle_evaluate():
    driver = buffered(size=2, concurrency=3, every=1)
    driver.join(*NAMES)
    busy = at_work(driver)
    deliver(driver, *busy[:2])
    evaluating = [i.client for i in driver.instructions if i.step.phase == "evaluate"]
    assert sorted(evaluating) == sorted(set(NAMES) - set(at_work(driver)))
    late = at_work(driver)[0]
    deliver(driver, late)
    for name in evaluating:
        driver.evaluate(name)
    assert len(driver.records) == 1
    assert late in driver.engine.state.attempt.updates


def test_the_end_and_a_pause_withdraw_everybody():
    driver = buffered(size=1, concurrency=3, rounds=1)
    driver.join(*NAMES)
    deliver(driver, at_work(driver)[0])
    assert driver.engine.state.status == "finished"
    assert len(driver.withdrawn) == 2
    assert at_work(driver) == []

    driver = buffered(size=2, concurrency=3)
    driver.join(*NAMES)
    driver.send(*(m.WorkStarted(name, work(driver, name)) for name in at_work(driver)))
    assert {each.state for each in driver.engine.view().clients.values()} == {"training"}
    driver.send(m.Pause("lunch"))
    assert len(driver.withdrawn) == 3
    assert {each.state for each in driver.engine.view().clients.values()} == {"available"}
    driver.join("e")
    assert at_work(driver) == []
    driver.send(m.Resume())
    assert {work(driver, name).attempt for name in at_work(driver)} == {2}


def test_a_restart_asks_again_and_forgets_nothing():
    driver = buffered(size=3, concurrency=3)
    driver.join(*NAMES)
    busy = at_work(driver)
    deliver(driver, busy[0])
    steps = {name: work(driver, name) for name in at_work(driver)}
    driver.instructions.clear()
    driver.now += 500.0
    driver.restart()
    assert {i.client: i.step for i in driver.instructions} == steps
    driver.advance(100)
    assert set(at_work(driver)) == set(steps)
    deliver(driver, *steps)
    assert len(driver.records) == 1
    assert busy[0] in driver.records[0].contributors


def test_the_view_says_who_is_at_work():
    driver = buffered(size=2, concurrency=1)
    assert driver.engine.view().waiting_for == "0 of 2 updates; at work: nobody"
    assert "waiting_for_clients" in driver.kinds()
    driver.join("a")
    assert driver.engine.view().waiting_for == "0 of 2 updates; at work: a"
    assert driver.engine.view().status == "running"


@pytest.mark.parametrize("strategy", ["data_size", "reliability", "round_robin"])
def test_every_strategy_fills_the_places(strategy):
    driver = buffered(size=2, concurrency=2, rounds=6, cohort=f'strategy = "{strategy}"')
    driver.join(*NAMES)
    while driver.engine.state.status != "finished":
        deliver(driver, at_work(driver)[0])
    assert len(driver.records) == 6


class TestWhatDoesNotGoTogether:
    def refused(self, text, error=ConfigError, mode='[round]\nmode = "buffered"\nbuffer = 4\n'):
        from roundtable.engine import make_plan

        with pytest.raises(error) as caught:
            make_plan(job(mode + text), 100)
        return str(caught.value)

    def test_sums_of_groups(self):
        text = "[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 1.0\ngroup_size = 3\n"
        assert "a buffer is one group" in self.refused(f"{text}[evaluation]\nevery = 0", PrivacyError)

    @pytest.mark.parametrize("level", ["client", "dp_ftrl"])
    def test_noise_on_a_sum(self, level):
        text = f'[privacy]\nlevel = "{level}"\nclip_norm = 1.0\nnoise_multiplier = 1.0\ndelta = 1e-6\n'
        text += '[aggregation]\nweighting = "uniform"\n[evaluation]\nevery = 0'
        assert "who answers first" in self.refused(text, PrivacyError)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[cohort]\nsize = 4", "round.concurrency is how many"),
            ("[cohort]\nover_selection = 2.0", "has no cohorts"),
            ('[cohort]\nstrategy = "poisson"\nprobability = 0.5', "draws one cohort for each round"),
            ("[cohort]\nminimum = 5", "cohort.minimum = 5 is above round.buffer = 4"),
        ],
    )
    def test_cohorts(self, text, words):
        assert words in self.refused(text)

    def test_noise_of_each_silo_goes_well(self):
        from roundtable.engine import make_plan

        text = '[round]\nmode = "buffered"\nbuffer = 4\n[privacy]\nlevel = "client_local"\nclip_norm = 1.0\n'
        text += 'noise_multiplier = 1.0\ndelta = 1e-6\n[aggregation]\nweighting = "uniform"\n'
        assert make_plan(job(text + "[evaluation]\nevery = 0"), 100).noise == SiloNoise(1.0)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('[round]\nmode = "buffered"', "buffer belongs to mode"),
            ("[round]\nbuffer = 3", "buffer belongs to mode"),
            ("[round]\nconcurrency = 3", "concurrency: only with mode"),
        ],
    )
    def test_half_a_table(self, text, words):
        with pytest.raises(ConfigError, match=words):
            job(text)
