"""Buffered rounds under secure aggregation: the sums are those of the updates, and nobody is seen alone."""

from __future__ import annotations

import pytest
import torch

from roundtable.core.errors import PrivacyError
from roundtable.privacy import Charge, compose

SLOW = {"speed": {"median": 10.0, "sigma": 1.2}, "latency": "1s", "jitter": 0.2}
MASKS = {"level": "none", "secure_aggregation": True, "clip_norm": 50.0}
DISCOUNTS = [
    {"staleness": "constant"},
    {"staleness": "hinge"},
    {"staleness": "polynomial", "staleness_exponent": 2.0},
    {"staleness": "hinge", "staleness_slope": 3.0, "staleness_free": 1},
]


@pytest.fixture
def masked(run):
    """A job with masked buffered rounds on devices of very different speed."""

    def go(task="Perceptron", **overrides):
        table = {"mode": "buffered", "buffer": 3, "concurrency": 8}
        table |= {k.removeprefix("round__"): overrides.pop(k) for k in list(overrides) if k[:7] == "round__"}
        settings = {"simulation__devices": SLOW, "cohort": {}, "round": table, "rounds": 6}
        settings |= {"privacy": MASKS, "evaluation__every": 0}
        return run(task, **{**settings, **overrides})

    return go


def test_a_group_is_of_one_model_and_old_ones_count(masked):
    result = masked(rounds=10)
    assert result.status == "finished"
    ages = [set(record.staleness.values()) for record in result.history.records]
    assert all(len(age) == 1 for age in ages)
    assert max(max(age) for age in ages) > 0
    assert result.history["time"] == sorted(result.history["time"])
    assert "the protocol ran" in result.history.records[0].charge["secure_aggregation"]


@pytest.fixture
def two_speeds(tmp_path):
    """Three fast clients and three slow ones: in the clear, too, a buffer has updates of one model."""
    rows = [f"{index},0,1e9,{9.0 if index < 3 else 2.0}" for index in range(6)]
    path = tmp_path / "speeds.csv"
    path.write_text("\n".join(["client,start,end,speed", *rows]) + "\n")
    alike = {"algorithm": {"batch_size": 8, "learning_rate": 0.1, "steps": 3}}
    alike |= {"aggregation__weighting": "uniform", "simulation__clients": 6}
    return {"simulation__devices": {"trace": str(path)}, "round__concurrency": 6, **alike}


@pytest.mark.parametrize("discount", DISCOUNTS, ids=str)
def test_masked_rounds_are_those_in_the_clear_to_the_rings_bound(masked, two_speeds, discount):
    """Same schedule, same ages, and models that differ by what rounding may change."""
    settings = {**two_speeds, "rounds": 8, **{f"round__{key}": value for key, value in discount.items()}}
    hidden, clear = masked(**settings), masked(**settings, privacy={"level": "none"})
    for one, other in zip(hidden.history.records, clear.history.records, strict=True):
        assert (one.contributors, one.staleness, one.ended) == (
            other.contributors,
            other.staleness,
            other.ended,
        )
    assert {age for record in hidden.history.records for age in record.staleness.values()} > {0}
    # A round's mean is off by m u / V < 2^-23 (docs/secure-aggregation.md, "Arithmetic"); training goes on.
    torch.testing.assert_close(hidden.model.vector, clear.model.vector, atol=8 * 2**-23 * 10, rtol=0)


def test_real_and_fast_masks_are_the_same_bits(masked):
    real, fast = masked(), masked(simulation__masking="fast")
    assert torch.equal(real.model.vector, fast.model.vector)


@pytest.mark.parametrize(
    ("task", "stops"), [("BatchNorm", [3]), pytest.param("Perceptron", [1, 2, 3, 4], marks=pytest.mark.slow)]
)
def test_a_resumed_run_ends_with_the_same_bits(masked, tmp_path, task, stops):
    """Stopped after any round, with finished updates of older models that wait for their group."""
    local = {"model__local": ["1.running_mean", "1.running_var"]} if task == "BatchNorm" else {}
    dropouts = {"dropout": 0.1, "crash_training": 0.05}
    settings = {"simulation__dropouts": dropouts, "simulation__masking": "fast", "rounds": 5, **local}
    whole = masked(task, **settings)
    for stop in stops:
        folder = tmp_path / str(stop)
        masked(task, _run_dir=folder, **{**settings, "rounds": stop})
        rest = masked(task, _run_dir=folder, _resume=True, **settings)
        assert torch.equal(rest.model.vector, whole.model.vector)
        assert rest.history.records[stop:] == whole.history.records[stop:]


def test_whoever_is_left_alone_drops_its_work_and_is_in_a_group_soon(masked):
    """Seven at work in groups of three: one is always left over, and never the same for long."""
    result = masked(round__concurrency=7, simulation__clients=7, rounds=12, simulation__masking="fast")
    assert result.status == "finished"
    taken = [name for record in result.history.records for name in record.contributors]
    assert len(set(taken)) == 7


def test_a_fleet_that_comes_and_goes_finishes(masked):
    fleet = {"speed": 0.05, "availability": 0.4, "period": "1d"}
    result = masked(
        simulation__devices=fleet, cohort__deadline="12h", simulation__masking="fast", simulation__clients=12
    )
    assert result.status == "finished"


NOISE = {"level": "distributed", "clip_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}


def test_each_group_is_one_release_without_amplification(masked):
    """What one client pays that is in every group is what the ledger says, however groups come about."""
    result = masked(
        privacy=NOISE, aggregation__weighting="uniform", simulation__masking="fast", round__buffer=4, rounds=3
    )
    assert result.status == "finished"
    for number, record in enumerate(result.history.records, start=1):
        charge = Charge.from_json(record.charge["charge"])
        assert charge.sampling == "none"
        assert record.charge["epsilon"] == pytest.approx(compose([charge] * number, 1e-5))


def test_a_budget_ends_the_job_before_the_group_that_it_does_not_hold(masked):
    one = masked(privacy=NOISE, aggregation__weighting="uniform", simulation__masking="fast", rounds=1)
    epsilon = one.history.records[0].charge["epsilon"] * 1.9
    result = masked(
        privacy={**NOISE, "epsilon": epsilon},
        aggregation__weighting="uniform",
        simulation__masking="fast",
        rounds=9,
    )
    assert result.status == "finished"
    assert 1 <= len(result.history.records) < 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round__buffer": 2}, r"round\.buffer = 2: a sum of fewer than 3"),
        ({"privacy": {**MASKS, "group_size": 3}}, "a buffer is one group"),
        ({"aggregation__rule": "median"}, "only their mean can be had"),
        ({"evaluation__bounds": {"accuracy": 1.0}, "evaluation__every": 1}, "an older model"),
        ({"transfer__up": "randomk(ratio=0.1, indices=cohort)"}, 'set transfer.up = "float32"'),
        ({"cohort__strategy": "data_size"}, "example counts stay hidden"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_round_1(masked, changes, said):
    with pytest.raises(PrivacyError, match=said):
        masked(**changes)
