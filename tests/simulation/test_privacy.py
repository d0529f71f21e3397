"""Differential privacy and secure aggregation in simulations."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from roundtable.privacy import Charge, compose

UNIFORM = {"aggregation__weighting": "uniform", "evaluation__every": 0}
SECURE = {**UNIFORM, "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 50.0}}
CENTRAL = {"level": "client", "clip_norm": 1.0, "delta": 1e-3}


def test_central_noise_is_added_and_charged(run):
    quiet = run(**UNIFORM, privacy={**CENTRAL, "noise_multiplier": 1e-4})
    loud = run(**UNIFORM, privacy={**CENTRAL, "noise_multiplier": 2.0})
    again = run(**UNIFORM, privacy={**CENTRAL, "noise_multiplier": 2.0})
    assert torch.equal(loud.model.vector, again.model.vector)
    # Three rounds of noise with standard deviation 2 · 1 / 5 on each coordinate.
    spread = (loud.model.vector - quiet.model.vector).std() / 3**0.5
    assert 0.34 < spread < 0.46
    charge = loud.history.records[0].charge
    assert charge["noise_multiplier"] == 2.0
    assert charge["guarantee"] is False


@pytest.mark.parametrize("backend", ["vectorised", "stacked", "processes"])
def test_backends_agree_under_clipping_and_noise(run, backend):
    settings = {**UNIFORM, "privacy": {**CENTRAL, "noise_multiplier": 0.5}}
    settings |= {"cohort__minimum": 1, "simulation__dropouts": {"dropout": 0.2}}
    reference = run(**settings)
    result = run(**settings, simulation__backend=backend, simulation__workers=1)
    assert torch.allclose(result.model.vector, reference.model.vector, atol=1e-5)


def test_the_protocol_gives_the_mean_that_one_sees_without_it(run):
    plain, secure = run(**UNIFORM, rounds=2), run(**SECURE, rounds=2)
    # Rounded to steps of clip_norm / levels: 50 · 2 · 5 / 2^32 in each round.
    assert torch.allclose(plain.model.vector, secure.model.vector, atol=1e-5)
    assert not torch.equal(plain.model.vector, secure.model.vector)
    assert "the protocol ran" in secure.history.records[0].charge["secure_aggregation"]


def test_fast_masking_gives_the_same_bits_and_says_so(run):
    drops = {"rounds": 2, "simulation__dropouts": {"dropout": 0.15}, "cohort__size": 8, "cohort__minimum": 6}
    real, fast = run(**SECURE, **drops), run(**SECURE, **drops, simulation__masking="fast")
    assert torch.equal(real.model.vector, fast.model.vector)
    assert real.status == fast.status == "finished"
    assert sum(real.history["failed"]) > 0
    assert "no masks were made" in fast.history.records[0].charge["secure_aggregation"]


@pytest.mark.parametrize("ring", [8, 12])
def test_small_rings_give_the_same_bits_masked_and_not(run, ring):
    small = {**SECURE, "privacy": {**SECURE["privacy"], "ring_bits": ring, "clip_norm": 2.0}, "rounds": 2}
    real, fast = run(**small), run(**small, simulation__masking="fast")
    plain = run(**UNIFORM, rounds=2)
    assert torch.equal(real.model.vector, fast.model.vector)
    off = (real.model.vector - plain.model.vector).norm()
    assert 0 < off < {8: 1.0, 12: 0.1}[ring]


FACTORS = {**SECURE, "transfer__up": "lowrank(rank=2, basis=cohort)", "rounds": 4}


@pytest.mark.parametrize(
    "how",
    [
        {"simulation__masking": "fast"},
        {"simulation__backend": "processes", "simulation__workers": 2},
        {"aggregation__server_optimizer": {"name": "fedadam", "learning_rate": 0.05}},
    ],
    ids=["fast", "processes", "an optimizer with a state"],
)
def test_masked_factors_are_the_same_however_they_are_added_up(run, tmp_path, how):
    """By every backend and masking, and where the run goes on from what was stored after its second round."""
    drops = {**FACTORS, "simulation__dropouts": {"dropout": 0.1}, "cohort__size": 8, "cohort__minimum": 6}
    optimizer = {k: v for k, v in how.items() if k.startswith("aggregation")}
    real = run(**drops, **optimizer)
    assert real.status == "finished"
    assert sum(real.history["failed"]) > 0
    run(**{**drops, "rounds": 2}, **how, _run_dir=tmp_path / "run")
    other = run(**drops, **how, _run_dir=tmp_path / "run", _resume=True)
    torch.testing.assert_close(other.model.vector, real.model.vector, rtol=1e-5, atol=1e-6)
    layout = real.model.layout
    assert layout.size == layout.model.size + (layout.basis.stop - layout.basis.start)


@pytest.mark.parametrize("masking", ["real", "fast"])
def test_too_few_survivors_fail_the_attempt(run, masking):
    lost = {"simulation__dropouts": {"dropout": 0.6}, "cohort__size": 8, "cohort__minimum": 1}
    result = run(**SECURE, **lost, cohort__retries=0, simulation__masking=masking)
    assert result.status == "paused"
    assert "of at least 6 updates" in result.reason


def test_noise_in_shares(run):
    table = {"level": "distributed", "delta": 1e-3, "noise_multiplier": 1.0}
    table |= {"dropout_tolerance": 0.25}
    settings = {**UNIFORM, "privacy": {**table, "clip_norm": 1.0}, "rounds": 1, "cohort__size": 8}
    private = run(**settings, simulation__masking="fast")
    real = run(**settings)
    assert torch.equal(private.model.vector, real.model.vector)
    clipped = run(**UNIFORM, privacy={**CENTRAL, "noise_multiplier": 1e-5}, rounds=1, cohort__size=8)
    spread = (private.model.vector - clipped.model.vector).std()
    # Six of eight may be all, and two of them may collude: eight shares of variance 1/4, over eight: 0.177.
    assert private.status == "finished"
    assert 0.15 < spread < 0.21
    charge = private.history.records[0].charge
    assert json.loads(json.dumps(charge))["level"] == "distributed"


def test_a_sum_that_makes_no_model_is_not_summed_again(run):
    """The model overflows once the sum is known: as in the service, the rounds are closed, and charged."""
    table = {"level": "distributed", "delta": 1e-3, "noise_multiplier": 1.0}
    settings = {**UNIFORM, "privacy": {**table, "clip_norm": 1e5}, "rounds": 2, "simulation__masking": "fast"}
    result = run(**settings, aggregation__server_optimizer={"name": "fedavg", "learning_rate": 1e38})
    assert result.status == "failed"
    assert "none of the 2 rounds has made a model" in result.reason
    first, second = result.history.records
    assert "is not finite" in first.closed
    assert (first.attempt, second.attempt) == (1, 1)
    assert first.model == second.model
    assert 0 < first.charge["epsilon"] < second.charge["epsilon"]


def test_weights_and_the_training_loss_are_summed_securely(run):
    plain = run(evaluation__every=0, rounds=2)
    secure = run(
        evaluation__every=0,
        rounds=2,
        privacy={"level": "none", "secure_aggregation": True, "clip_norm": 50.0},
    )
    assert torch.allclose(plain.model.vector, secure.model.vector, atol=1e-3)
    assert secure.history["train_loss"] == pytest.approx(plain.history["train_loss"], rel=0.05)
    assert secure.history.records[0].weights == {}


def test_correlated_noise_over_rounds(run):
    table = {"level": "dp_ftrl", "clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 0.5, "separation": 2}
    settings = {**UNIFORM, "privacy": table, "cohort__strategy": "round_robin", "cohort__size": 4}
    one, two = run(**settings), run(**settings)
    assert one.status == "finished"
    assert torch.equal(one.model.vector, two.model.vector)
    assert one.history.records[0].charge["level"] == "dp_ftrl"


def test_correlated_noise_keeps_a_client_from_rounds_too_close_together(run):
    table = {"level": "dp_ftrl", "clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 0.5, "separation": 2}
    settings = {**UNIFORM, "privacy": table, "cohort__strategy": "uniform", "cohort__size": 4}
    cohorts = [set(record.cohort) for record in run(**settings).history.records]
    assert len(cohorts) > 1
    assert all(before.isdisjoint(after) for before, after in pairwise(cohorts))


def test_amplified_correlated_noise_costs_what_the_plan_says(run):
    table = {"level": "dp_ftrl", "clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 2.0, "separation": 2}
    settings = {**UNIFORM, "privacy": {**table, "cohorts": "hidden"}, "rounds": 5}
    found = run(**settings, cohort__size=None, cohort__strategy="poisson", cohort__probability=0.5)
    assert found.status == "finished"
    epsilons = [record.charge["epsilon"] for record in found.history.records]
    turn = Charge("gaussian", "client", "poisson", (("update", 2.0),), rate=0.5, groups=2)
    assert epsilons == pytest.approx([compose([turn.repeated(n)], 1e-3) for n in (1, 1, 2, 2, 3)])
    odd = {name for record in found.history.records[::2] for name in record.contributors}
    even = {name for record in found.history.records[1::2] for name in record.contributors}
    assert odd
    assert even
    assert odd.isdisjoint(even)


OWN = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}
ONE_STEP = {"algorithm__epochs": None, "algorithm__steps": 2, "algorithm__batch_size": 4}


@pytest.mark.parametrize("level", ["example", "client_local"])
def test_what_silos_do_for_themselves_is_simulated_by_the_agents_own_code(run, level):
    settings = {**UNIFORM, **ONE_STEP, "privacy": {**OWN, "level": level}, "rounds": 2}
    one, two = run(**settings), run(**settings)
    assert one.status == "finished"
    assert torch.equal(one.model.vector, two.model.vector), "noise can be repeated here, and only here"
    other = run(**settings, seed=6)
    assert not torch.equal(one.model.vector, other.model.vector)
    last = one.history.records[-1]
    assert last.training == {}
    assert last.charge["guarantee"] is False
    assert one.model.metadata["privacy"].startswith("NO GUARANTEE")
    (charge,) = (
        {Charge.from_json(text) for text in last.charge["paid"]} if level == "client_local" else [None]
    )
    most = one.history["epsilon"][-1]
    if charge is not None:
        assert most == pytest.approx(compose([charge.repeated(2)], 1e-3))
    assert most > one.history["epsilon"][0] > 0.0
    assert f"epsilon = {most:.3f}" in one.model.metadata["privacy"]


@pytest.mark.parametrize("level", ["example", "client_local"])
def test_workers_give_the_same_bits_where_silos_add_the_noise(run, level):
    settings = {**UNIFORM, **ONE_STEP, "privacy": {**OWN, "level": level}, "rounds": 2}
    result = run(**settings, simulation__backend="processes", simulation__workers=2)
    assert torch.equal(result.model.vector, run(**settings).model.vector)
    assert result.status == "finished"


def test_a_budget_stops_a_simulation_before_the_round_that_would_pass_it(run):
    table = {**CENTRAL, "noise_multiplier": 1.0, "epsilon": 12.0}
    result = run(**UNIFORM, privacy=table, rounds=50)
    assert result.status == "finished"
    assert "above its budget of 12" in result.reason
    done = len(result.history)
    charge = Charge.from_json(result.history.records[0].charge["charge"])
    assert compose([charge.repeated(done)], 1e-3) <= 12.0 < compose([charge.repeated(done + 1)], 1e-3)
    assert result.history["epsilon"][-1] == pytest.approx(compose([charge.repeated(done)], 1e-3))


def test_the_budget_of_each_silo_stops_noise_of_its_own(run):
    table = {**OWN, "level": "client_local", "noise_multiplier": 3.0, "epsilon": 4.0}
    result = run(**UNIFORM, **ONE_STEP, privacy=table, rounds=50)
    assert "above its budget of 4" in result.reason
    assert 0 < len(result.history) < 50
    assert max(result.history["epsilon"]) <= 4.0


def test_a_silo_whose_records_have_spent_their_budget_refuses_while_others_go_on(run):
    """Sizes differ: the smallest data set is sampled at the highest rate and is spent first."""
    table = {**OWN, "level": "example", "epsilon": 5.0}
    whole = {"cohort__size": 8, "cohort__minimum": 2}
    result = run(**UNIFORM, **ONE_STEP, **whole, privacy=table, rounds=4)
    refused = result.history.records[-1].failures
    assert 0 < len(refused) < 8
    assert all("above its budget of 5" in reason for reason in refused.values())
    assert not result.history.records[0].failures


def test_a_resumed_run_goes_on_with_its_accounts(run, tmp_path):
    table = {**OWN, "level": "client_local", "noise_multiplier": 3.0, "epsilon": 4.0}
    settings = {**UNIFORM, **ONE_STEP, "privacy": table}
    whole = run(**settings, rounds=50)
    run(**settings, rounds=1, _run_dir=tmp_path / "run")
    resumed = run(**settings, rounds=50, _run_dir=tmp_path / "run", _resume=True)
    assert resumed.history["epsilon"] == whole.history["epsilon"]
    assert resumed.reason == whole.reason
    assert torch.equal(resumed.model.vector, whole.model.vector)
