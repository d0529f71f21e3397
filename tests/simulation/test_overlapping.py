"""Buffered rounds in virtual time: faster where clients are slow, equal bits after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.simulation import simulate

SLOW = {"speed": {"median": 10.0, "sigma": 1.2}, "latency": "1s", "jitter": 0.2}


@pytest.fixture
def buffered(run):
    """A job with buffered rounds on devices of very different speed."""

    def go(task="Perceptron", **overrides):
        table = {"mode": "buffered", "buffer": 2, "concurrency": 5}
        table |= {k.removeprefix("round__"): overrides.pop(k) for k in list(overrides) if k[:7] == "round__"}
        settings = {"simulation__devices": SLOW, "cohort": {}, "round": table, "rounds": 8, **overrides}
        return run(task, **settings)

    return go


def test_updates_come_as_they_are_done_and_get_old(buffered):
    result = buffered()
    assert result.status == "finished"
    assert result.history["clients"] == [2] * 8
    assert max(result.history["staleness"]) > 0
    assert result.history["time"] == sorted(result.history["time"])
    assert result.history["accuracy"][-1] > 0.8


def test_virtual_time_shows_what_waiting_for_stragglers_costs(buffered, run):
    """As many updates in all, in a fraction of the time, and as good a model."""
    late = buffered(rounds=20, evaluation__every=5)
    sync = run(simulation__devices=SLOW, cohort__size=5, rounds=8, evaluation__every=4)
    assert sum(late.history["clients"]) >= sum(sync.history["clients"]) == 40
    assert late.history["time"][-1] < 0.5 * sync.history["time"][-1]
    assert late.history["accuracy"][-1] > sync.history["accuracy"][-1] - 0.05


def test_one_client_after_the_other_is_a_naive_loop(buffered, make_job):
    """K = 1 and one at a time: nobody is stale, and the model moves by each whole update."""
    result = buffered(round__buffer=1, round__concurrency=1, rounds=4)
    assert set(result.history["staleness"]) == {0}
    assert [len(record.contributors) for record in result.history.records] == [1] * 4


@pytest.mark.parametrize(
    ("discount", "factor"),
    [
        ({}, 1 / np.sqrt(2)),
        ({"staleness_exponent": 2.0}, 1 / 4),
        ({"staleness": "hinge"}, 1 / 1.1),
        ({"staleness": "hinge", "staleness_slope": 3.0}, 1 / 4),
        ({"staleness": "hinge", "staleness_slope": 3.0, "staleness_free": 1}, 1.0),
    ],
)
def test_staleness_scales_what_an_update_does(buffered, discount, factor):
    """With two at work and K = 1 the second update is one model old: it moves the model by the factor."""
    moved = {}
    for name, table in (("plain", {"staleness": "constant"}), ("scaled", discount)):
        for rounds in (1, 2):
            settings = {f"round__{key}": value for key, value in table.items()}
            settings |= {"round__buffer": 1, "round__concurrency": 2}
            result = buffered(rounds=rounds, simulation__devices={"speed": 10.0}, **settings)
            assert [r.staleness for r in result.history.records][1:] in ([], [{_last(result): 1}])
            moved[name, rounds] = result.model.vector
    torch.testing.assert_close(moved["plain", 1], moved["scaled", 1])
    plain, scaled = moved["plain", 2] - moved["plain", 1], moved["scaled", 2] - moved["scaled", 1]
    torch.testing.assert_close(scaled, plain * factor, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"staleness": "hinge", "staleness_exponent": 0.7}, 'staleness_exponent: only with .* "polynomial"'),
        ({"staleness_free": 2}, 'staleness_free: only with staleness = "hinge"'),
        ({"staleness": "linear"}, r"round\.staleness: .*'polynomial', 'hinge' or 'constant'"),
        ({"staleness": "hinge", "staleness_slope": 0.0}, r"round\.staleness_slope.*greater than 0"),
    ],
)
def test_a_discount_that_is_none_is_refused_with_what_there_is(buffered, table, said):
    with pytest.raises(ConfigError, match=said):
        buffered(**{f"round__{key}": value for key, value in table.items()})


def _last(result):
    return result.history.records[-1].contributors[0]


def test_who_is_too_old_is_given_up_and_the_record_says_so(buffered):
    result = buffered(round__max_staleness=1, rounds=12)
    whys = [why for record in result.history.records for why in record.failures.values()]
    assert any("round.max_staleness = 1" in why for why in whys)
    assert all(age <= 1 for record in result.history.records for age in record.staleness.values())


@pytest.mark.parametrize("backend", ["processes", "vectorised", "stacked"])
def test_other_backends_agree(buffered, backend):
    reference = buffered(simulation__backend="sequential").model.vector
    other = buffered(simulation__backend=backend, simulation__workers=2).model.vector
    if backend == "processes":
        assert torch.equal(reference, other)
    else:
        torch.testing.assert_close(reference, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("task", ["Perceptron", "BatchNorm"])
def test_a_resumed_run_ends_with_the_same_bits(buffered, tmp_path, task):
    """Stopped after any round, with older models at work and updates waiting."""
    local = {"model__local": ["1.running_mean", "1.running_var"]} if task == "BatchNorm" else {}
    settings = {
        "simulation__dropouts": {"dropout": 0.1, "crash_training": 0.05},
        "cohort__minimum": 1,
        **local,
    }
    whole = buffered(task, **settings)
    for stop in (1, 3, 6):
        folder = tmp_path / str(stop)
        buffered(task, rounds=stop, _run_dir=folder, **settings)
        rest = buffered(task, _run_dir=folder, _resume=True, **settings)
        assert torch.equal(rest.model.vector, whole.model.vector)
        assert rest.history.records[stop:] == whole.history.records[stop:]
    kept = sorted(path.stem for path in (tmp_path / "6" / "state").glob("model-*"))
    earlier = json.loads((tmp_path / "6" / "state" / "checkpoint.json").read_text())["earlier"]
    assert kept == sorted({"model-8", *(f"model-{made}" for made in earlier if made)})


def test_a_fleet_that_comes_and_goes_keeps_training(buffered):
    fleet = {"speed": 0.05, "availability": 0.4, "period": "1d"}
    result = buffered(simulation__devices=fleet, cohort__deadline="12h", rounds=6)
    assert result.status == "finished"
    assert result.history["time"][-1] > 1000.0


def test_nobody_ever_coming_back_is_an_error_not_a_hang(buffered, tmp_path):
    (tmp_path / "t.csv").write_text("client,start,end\na,0,1\n")
    with pytest.raises(RoundtableError, match=r"round 1 waits for ever: 0 of 2 updates"):
        buffered(simulation__devices={"trace": str(tmp_path / "t.csv"), "speed": 1.0, "latency": 5.0})


def test_dropouts_attacks_and_robust_rules_go_well_with_it(buffered):
    result = buffered(
        round__buffer=5,
        round__concurrency=8,
        simulation__attack={"name": "nan", "count": 1},
        simulation__dropouts={"crash_upload": 0.1},
        aggregation__rule="median",
        rounds=5,
        cohort__grace=5.0,
    )
    assert result.status == "finished"
    assert any("not finite" in why for record in result.history.records for why in record.excluded.values())
    assert bool(torch.isfinite(result.model.vector).all())


def test_a_buffer_larger_than_the_population_is_refused(buffered):
    with pytest.raises(ConfigError, match=r"round\.buffer = 9 asks for more clients a round"):
        buffered(round__buffer=9)


def test_without_time_everything_still_ends(make_job):
    """Devices that take no time answer at once: no virtual second passes, and no round waits."""
    job = make_job(round={"mode": "buffered", "buffer": 3}, cohort={}, rounds=4)
    result = simulate(job, folder=make_job.__globals__["HERE"])
    assert result.status == "finished"
    assert result.history["time"] == [0.0] * 4


def test_clients_that_dropped_out_return_where_others_come_and_go(buffered):
    """Places are offered at each arrival: that something is always due must not keep dropouts away."""
    devices = {**SLOW, "availability": 0.6, "period": "60s"}
    result = buffered(
        simulation__devices=devices,
        simulation__dropouts={"dropout": 0.7},
        round__buffer=4,
        cohort={"retries": 99},
        rounds=1,
    )
    assert result.status == "finished"
