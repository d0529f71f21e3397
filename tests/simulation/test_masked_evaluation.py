"""Metrics inside the secure sum, simulated: every backend, both ways of masking, and clients that cannot."""

from __future__ import annotations

import pytest
import torch

from roundtable.client.training.metrics import left_out_or_cut, summable
from roundtable.core.errors import TaskError
from roundtable.simulation.reporting.plots import curves

SUMMED = {
    "rounds": 3,
    "cohort__size": 8,
    "evaluation__bounds": {"accuracy": 1.0, "loss": 20.0},
    "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 50.0},
}


@pytest.fixture(scope="module")
def plain_job():
    return {"rounds": 3, "cohort__size": 8, "evaluation__clients": "cohort"}


def before(result):
    return [record.before for record in result.history.records]


@pytest.mark.parametrize("backend", ["sequential", "vectorised", "stacked", "processes"])
def test_every_backend_sums_what_plain_evaluation_tells(run, plain_job, backend):
    plain = run(**plain_job)
    summed = run(**SUMMED, simulation__backend=backend, simulation__masking="fast")
    for earlier, record in zip(plain.history.records, summed.history.records[1:], strict=False):
        assert record.before.keys() == earlier.evaluation.keys()
        for name, (total, count) in record.before.items():
            assert count == earlier.evaluation[name][1]
            # The models differ by the random rounding of masked updates.
            assert total == pytest.approx(
                earlier.evaluation[name][0], abs=1.01 if name == "accuracy" else 0.02
            )
        assert record.evaluation == {}
    assert {"before_accuracy", "before_loss"} <= set(summed.history.columns)
    assert "accuracy" not in summed.history.columns


def test_curves_show_what_was_measured_before_a_round_at_the_round_that_made_the_model(run):
    pytest.importorskip("matplotlib")
    summed = run(**SUMMED, simulation__masking="fast")
    axes = {axis.get_ylabel(): axis for axis in curves({"run": [summed.history]}).axes}
    assert sorted(axes) == ["accuracy", "loss"]
    (line,) = axes["accuracy"].lines
    assert list(line.get_xdata()) == [0, 1, 2]
    assert list(line.get_ydata()) == summed.history["before_accuracy"]


def test_masks_change_no_bit_and_a_run_goes_on_with_the_same(run, tmp_path):
    real, fast = run(**SUMMED), run(**SUMMED, simulation__masking="fast")
    assert before(real) == before(fast)
    assert torch.equal(real.model.vector, fast.model.vector)
    sparse = run(**SUMMED, evaluation__every=2)
    assert [bool(sums) for sums in before(sparse)] == [True, False, True]
    assert torch.equal(real.model.vector, sparse.model.vector), "measuring changes nothing that is trained"


def test_groups_are_added_up(run):
    grouped = {"aggregation__rule": "trimmed_mean", "aggregation__parameters": {"f": 1}}
    nine = {**SUMMED, "simulation__clients": 9, "cohort__size": 9, "rounds": 1}
    privacy = {**SUMMED["privacy"], "group_size": 3}
    (one,), (whole,) = before(run(**{**nine, **grouped, "privacy": privacy})), before(run(**nine))
    for name, (total, count) in whole.items():
        assert one[name] == (pytest.approx(total, abs=1e-2), count)


def test_bounds_of_what_no_client_measures_end_the_run(run):
    said = "evaluation.bounds names recall, and the task measures accuracy, loss"
    with pytest.raises(TaskError, match=said):
        run(**{**SUMMED, "evaluation__bounds": {"recall": 1.0}, "cohort__retries": 0})


def test_what_the_sum_does_not_hold_as_measured_is_said_once(run):
    with pytest.warns(UserWarning, match="evaluation.bounds") as told:
        cut = run(**{**SUMMED, "evaluation__bounds": {"loss": 0.01}})
    assert len([each for each in told if "counts for no more than" in str(each.message)]) == 1
    total, count = before(cut)[0]["loss"]
    assert total / count == pytest.approx(0.01, rel=1e-2)


def test_a_metric_that_is_not_finite_is_left_out_in_words():
    measured = {"accuracy": (float("nan"), 4), "loss": (1.0, 4)}
    bounds = {"accuracy": 1.0, "loss": 20.0}
    assert summable(measured, bounds) == {"loss": (1.0, 4)}
    (words,) = left_out_or_cut(measured, bounds).values()
    assert words.startswith("accuracy is over no example, or not finite")
