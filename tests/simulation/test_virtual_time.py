"""Devices, deadlines, stragglers, dropouts and availability, all in virtual time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.engine import NumberedNames, RoundEngine
from roundtable.engine.messages import UpdateArrived
from roundtable.simulation.backends.sequential import Sequential
from roundtable.simulation.world.config import DevicesTable
from roundtable.simulation.world.declared import Declared
from roundtable.simulation.world.devices import Devices, Transfer
from roundtable.simulation.world.fleet import Fleet

DAY = 86400.0


def devices(count=50, folder=None, **table):
    return Devices(DevicesTable.model_validate(table), count, 3, folder)


def test_time_is_latency_transfer_and_training():
    fleet = devices(latency="2s", speed=100.0, download=1000.0, upload=500.0)
    assert fleet.seconds(4, 1, 250, Transfer(3000, 1000)) == 2.0 + 2.5 + 3.0 + 2.0
    assert devices().instant
    assert devices().seconds(0, 1, 10**6, Transfer(10**9, 10**9)) == 0.0


def test_speeds_are_lognormal_and_belong_to_the_client():
    fleet = devices(count=20000, speed={"median": 50.0, "sigma": 0.5})
    times = np.array([fleet.seconds(i, 1, 50, Transfer(0, 0)) for i in range(20000)])
    # log time is normal with mean 0 and sd 0.5: the bounds are five standard errors.
    assert abs(np.log(times).mean()) < 5 * 0.5 / math.sqrt(20000)
    assert abs(np.log(times).std() - 0.5) < 5 * 0.5 / math.sqrt(2 * 20000)
    assert fleet.seconds(7, 1, 50, Transfer(0, 0)) == fleet.seconds(7, 9, 50, Transfer(0, 0))
    jittery = devices(speed=50.0, jitter=0.3)
    assert jittery.seconds(7, 1, 50, Transfer(0, 0)) != jittery.seconds(7, 2, 50, Transfer(0, 0))


def test_availability_is_a_share_of_each_period():
    fleet = devices(count=400, availability=0.25, period="1d")
    shares = [len(fleet.online(hour * 3600.0)) / 400 for hour in range(48)]
    assert abs(np.mean(shares) - 0.25) < 0.01
    assert np.array_equal(fleet.online(3600.0), fleet.online(3600.0 + DAY))
    for index in range(20):
        leaves = fleet.leaves_at(index, 1000.0)
        there = index in fleet.online(1000.0)
        assert there == (leaves > 1000.0)
        if there:
            assert index in fleet.online(leaves - 1.0)
            assert index not in fleet.online(leaves + 1.0)


def test_the_next_arrival_is_when_somebody_comes():
    fleet = devices(count=3, availability=0.1, period=1000.0)
    now = 0.0
    for _ in range(10):
        after = fleet.next_arrival(now)
        assert after > now
        assert len(fleet.online(after + 1e-6)) > 0
        now = after


class TestTrace:
    def write(self, folder, text):
        (folder / "fleet.csv").write_text(text)
        return devices(count=4, folder=folder, trace="fleet.csv")

    def test_intervals_and_rates_repeat_over_the_population(self, tmp_path):
        fleet = self.write(tmp_path, "client,start,end,speed\na,0,10,5\nb,20,30,10\na,40,50,5\n")
        assert fleet.online(5.0).tolist() == [0, 2]
        assert fleet.online(25.0).tolist() == [1, 3]
        assert len(fleet.online(15.0)) == 0
        assert fleet.leaves_at(2, 5.0) == 10.0
        assert fleet.next_arrival(5.0) == 20.0
        assert fleet.next_arrival(45.0) is None
        assert fleet.seconds(3, 1, 100, Transfer(0, 0)) == 10.0

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("client,start\na,0\n", "no column end"),
            ("client,start,end,colour\na,0,1,red\n", "unknown column 'colour'"),
            ("client,start,end\na,0,1\na,5,2\n", "line 3: start 5 must be at least 0 and before end 2"),
            ("client,start,end\na,zero,1\n", "line 2: could not convert"),
            ("client,start,end\n", "holds no intervals"),
            ("client,start,end,speed\na,0,1,5\nb,0,1,\n", "client 'b' has no speed"),
            ("client,start,end,speed\na,0,1,-5\n", "speed must be above 0"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path, text, message):
        with pytest.raises(ConfigError, match=message):
            self.write(tmp_path, text)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot be read"):
            devices(folder=tmp_path, trace="nowhere.csv")


def test_mistakes_in_the_tables_are_named(run):
    with pytest.raises(ConfigError, match=r"sped: unknown key; did you mean 'speed'"):
        run(simulation__devices={"sped": 3})
    with pytest.raises(ConfigError, match=r"simulation\.devices: speed\.median: .*greater than 0"):
        run(simulation__devices={"speed": -3})
    with pytest.raises(ConfigError, match=r"simulation\.dropouts: dropout: .*less than or equal to 1"):
        run(simulation__dropouts={"dropout": 1.5})
    with pytest.raises(ConfigError, match="leave out availability"):
        run(simulation__devices={"trace": "x.csv", "availability": 0.5})


def test_a_fleet_is_whoever_is_there_and_has_not_gone():
    job = JobConfig.model_validate({"task": {"name": "t"}, "simulation": {"clients": 50}})
    fleet = Fleet(NumberedNames(50), Declared(job, devices(availability=0.5, period=100.0), lambda _: (0, 0)))
    fleet.now = 30.0
    there = list(fleet.free())
    assert len(fleet.free()) == len(there)
    assert [name for name in fleet.known() if fleet.is_online(name)] == there
    fleet.leave(there[0])
    assert list(fleet.free()) == there[1:]
    assert not fleet.is_online(there[0])
    fleet.join(fleet.info(there[0]), True)
    assert list(fleet.free()) == there


def test_stragglers_are_left_behind_by_over_selection(run):
    spread = {"speed": {"median": 10.0, "sigma": 1.0}}
    patient = run(simulation__devices=spread)
    eager = run(simulation__devices=spread, cohort__over_selection=1.6)
    assert [record.cohort.__len__() for record in eager.history.records] == [8, 8, 8]
    assert eager.history["clients"] == [5, 5, 5]
    assert eager.history["time"][-1] < patient.history["time"][-1]
    # All eight are asked, and the five fastest for their work are always the same ones.
    assert len({record.contributors for record in eager.history.records}) == 1


def test_a_withdrawn_straggler_is_never_trained(run):
    heard = []
    run(
        simulation__devices={"speed": {"median": 10.0, "sigma": 1.0}},
        cohort__over_selection=1.6,
        _progress=heard.append,
    )
    trained = [event for event in heard if event.kind == "clients" and event.phase == "train"]
    assert len(trained) == 15


def test_the_deadline_drops_the_slow(run):
    result = run(
        simulation__devices={"speed": {"median": 10.0, "sigma": 1.5}},
        cohort__size=8,
        cohort__minimum=2,
        cohort__deadline=6.0,
    )
    record = result.history.records[0]
    assert record.ended - record.started == 6.0
    assert 2 <= len(record.contributors) < 8
    assert set(record.failures.values()) == {"no update before the deadline"}


def test_dropouts_are_waited_for_no_longer_than_the_grace_time(run):
    result = run(
        simulation__devices={"speed": 10.0},
        simulation__dropouts={"dropout": 0.4},
        cohort__size=8,
        cohort__minimum=1,
        cohort__grace=11.0,
        rounds=4,
    )
    lost = sum(result.history["failed"])
    assert 0.4 * 32 - 4 * 2.8 < lost < 0.4 * 32 + 4 * 2.8
    assert result.status == "finished"
    assert max(result.history["time"]) < 4 * 60


def test_a_day_of_a_slow_fleet_takes_virtual_time_alone(run):
    result = run(
        simulation__devices={"speed": 0.01, "availability": 0.5, "period": "1d"},
        cohort__deadline="12h",
        cohort__size=3,
        cohort__minimum=1,
        rounds=4,
    )
    assert result.status == "finished"
    assert result.history["time"][-1] > 4 * 1000.0


def test_nobody_ever_coming_back_is_an_error_not_a_hang(run, tmp_path):
    (tmp_path / "t.csv").write_text("client,start,end\na,0,1\n")
    with pytest.raises(RoundtableError, match=r"round 1 waits for ever"):
        run(simulation__devices={"trace": str(tmp_path / "t.csv"), "speed": 1.0, "latency": 5.0})


@pytest.mark.parametrize("backend", ["sequential", "stacked"])
def test_clients_that_crash_are_replaced_within_the_attempt_and_deadline(run, backend):
    """Unless the draw of the cohort rests on nobody being replaced."""
    dropouts = {"crash_training": 0.3}
    devices = {"speed": {"median": 10.0, "sigma": 1.2}, "latency": "1s"}
    settings = {
        "simulation__dropouts": dropouts,
        "simulation__backend": backend,
        "simulation__devices": devices,
    }
    records = run(cohort__size=4, cohort__minimum=1, rounds=6, **settings).history.records
    assert [len(record.contributors) for record in records] == [4] * 6
    assert {record.attempt for record in records} == {1}
    assert max(len(record.cohort) for record in records) > 4
    assert all(len(record.cohort) == 4 + len(record.failures) for record in records)
    assert records == run(cohort__size=4, cohort__minimum=1, rounds=6, **settings).history.records

    cohort = {"strategy": "poisson", "probability": 0.5}
    drawn = run(cohort=cohort, rounds=6, **settings).history.records
    assert all(len(r.cohort) == len(r.contributors) + len(r.failures) for r in drawn)
    assert any(record.failures for record in drawn)


def test_crashes_in_each_phase_are_reported(run):
    training = run(simulation__dropouts={"crash_training": 0.3}, cohort__minimum=1, cohort__size=8)
    assert any("crashed in training" in why for r in training.history.records for why in r.failures.values())
    upload = run(simulation__dropouts={"crash_upload": 0.3}, cohort__minimum=1, cohort__size=8)
    assert any("while uploading" in why for r in upload.history.records for why in r.failures.values())
    evaluation = run(simulation__dropouts={"crash_evaluation": 0.5}, cohort__size=8)
    assert all(len(record.client_metrics) < 8 for record in evaluation.history.records)
    assert not any(evaluation.history["failed"])


def test_answers_are_delivered_while_others_train(run, monkeypatch):
    """After round 1, in which all of them show whether the task works at all."""
    happened = []
    train, handle = Sequential._train, RoundEngine.handle

    def training(self, round, vector, item, row):
        happened.append((round, "trains", item.client))
        return train(self, round, vector, item, row)

    def handling(self, event, now):
        if isinstance(event, UpdateArrived):
            happened.append((event.step.round, "delivered", event.update.client))
        return handle(self, event, now)

    monkeypatch.setattr(Sequential, "_train", training)
    monkeypatch.setattr(RoundEngine, "handle", handling)
    run(simulation__backend="sequential", rounds=2)
    first, second = ([what for round, what, _ in happened if round == number] for number in (1, 2))
    count = len(first) // 2
    assert count > 1
    assert first == ["trains"] * count + ["delivered"] * count
    assert second == ["trains", "delivered"] * count
