"""From updates to the next model: against the arithmetic written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundtable.aggregation import TensorMatrix
from roundtable.core import open_model, parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ConfigError, PrivacyError
from roundtable.core.privacy_table import Masking, masking_of
from roundtable.engine import (
    Combined,
    Mean,
    Plan,
    Rows,
    ServerState,
    combine,
    initial_server_state,
    make_plan,
)
from roundtable.engine.messages import RowReference, Update
from roundtable.engine.validation.round_noise import FreshNoise, NoiseElsewhere
from roundtable.privacy import SecureNoise, SeededNoise, compose


def job(text: str = "") -> JobConfig:
    return parse_job('task = "t"\n' + text)


def updates(*examples: int) -> list[Update]:
    return [Update(f"silo-{i}", RowReference(i), n, loss=1.0) for i, n in enumerate(examples)]


def run(plan: Plan, rows: torch.Tensor, model: torch.Tensor, state: ServerState, number: int) -> Combined:
    return combine(
        plan, Rows(TensorMatrix(rows), updates(*[1] * len(rows))), model, state, round=number, seed=3
    )


def test_fedavg_is_the_mean_weighted_by_examples() -> None:
    plan = make_plan(job(), population=3)
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 4.0]])
    model = torch.tensor([10.0, 20.0])
    result = combine(
        plan,
        Rows(TensorMatrix(rows), updates(1, 1, 2)),
        model,
        initial_server_state(plan, 2),
        round=1,
        seed=0,
    )
    assert result.vector.tolist() == [10 + 9 / 4, 20 + 9 / 4]
    assert model.tolist() == [10.0, 20.0]
    assert result.account.weights == {"silo-0": 0.25, "silo-1": 0.25, "silo-2": 0.5}


def test_a_silo_weighs_no_more_than_ten_medians_unless_the_job_says_so() -> None:
    rows = Rows(TensorMatrix(torch.tensor([[1.0], [1.0], [-1.0]])), updates(40, 60, 2**53))

    def combined(text: str = "") -> Combined:
        plan = make_plan(job(text), population=3)
        return combine(plan, rows, torch.zeros(1), initial_server_state(plan, 1), round=1, seed=0)

    account = combined().account
    assert account.weights == pytest.approx({"silo-0": 4 / 70, "silo-1": 6 / 70, "silo-2": 60 / 70})
    [note] = account.diagnosis["clipped"]
    assert (note["client"], note["reason"]) == ("silo-2", "weight")
    assert "count as 600, 10 times the median" in note["message"]
    free = combined('[aggregation.validation]\nweight_ratio = "off"').account
    assert free.weights["silo-2"] > 1 - 1e-12
    assert not free.diagnosis["clipped"]


def test_silos_of_sizes_one_to_a_hundred_are_weighed_as_they_are() -> None:
    plan = make_plan(job(), population=5)
    rows = Rows(TensorMatrix(torch.ones(5, 1)), updates(100, 300, 1000, 3000, 10000))
    account = combine(plan, rows, torch.zeros(1), initial_server_state(plan, 1), round=1, seed=0).account
    assert account.weights["silo-4"] == pytest.approx(10000 / 14400)
    assert not account.diagnosis["clipped"]


@pytest.mark.parametrize(("size", "left_out"), [(3e38, True), (101.0, True), (99.0, False)])
def test_a_finite_update_beyond_a_hundred_medians_is_left_out(size: float, left_out: bool) -> None:
    plan = make_plan(job(), population=3)
    rows = torch.tensor([[1.0], [size], [1.0]])
    result = run(plan, rows, torch.zeros(1), initial_server_state(plan, 1), 1)
    assert ("silo-1" in result.account.excluded) == left_out
    if left_out:
        assert result.vector.tolist() == [1.0]
        assert "100 times the median" in result.account.excluded["silo-1"]
    free = make_plan(job('[aggregation.validation]\nnorm_ratio = "off"'), population=3)
    assert not run(free, rows / 10, torch.zeros(1), initial_server_state(free, 1), 1).account.excluded


def test_a_ratio_that_secure_aggregation_cannot_look_at_is_refused() -> None:
    masked = (
        "[cohort]\nsize = 3\n[evaluation]\nevery = 0\n"
        '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n'
    )
    make_plan(job(masked), population=3)
    with pytest.raises(PrivacyError, match=r"validation\.norm_ratio: under secure aggregation nobody sees"):
        make_plan(job(masked + "[aggregation.validation]\nnorm_ratio = 5.0"), population=3)


def test_a_broken_update_is_left_out_and_named() -> None:
    plan = make_plan(job(), population=2)
    rows = torch.tensor([[1.0], [float("nan")]])
    result = run(plan, rows, torch.zeros(1), initial_server_state(plan, 1), 1)
    assert result.vector.tolist() == [1.0]
    assert list(result.account.excluded) == ["silo-1"]


def test_a_model_that_overflows_is_refused() -> None:
    plan = make_plan(job(), population=1)
    big = torch.tensor([3e38])
    with pytest.raises(AggregationError, match="new model is not finite"):
        run(plan, big[None], big, initial_server_state(plan, 1), 1)


@pytest.mark.parametrize("name", ["fedavgm", "diloco", "fedadam", "fedyogi", "fedadagrad", "fedlion"])
def test_the_server_state_survives_a_restart_to_the_bit(name: str, tmp_path: Path) -> None:
    plan = make_plan(
        job(f'[aggregation.server_optimizer]\nname = "{name}"\nschedule = {{ name = "cosine", rounds = 9 }}'),
        3,
    )
    generator = torch.Generator().manual_seed(1)
    rounds = [torch.randn(3, 7, generator=generator) for _ in range(4)]

    def play(restart: bool) -> torch.Tensor:
        model, state = torch.ones(7), initial_server_state(plan, 7)
        for number, rows in enumerate(rounds, start=1):
            result = run(plan, rows, model, state, number)
            model, state = result.vector, result.state
            if restart:
                (tmp_path / "state").write_bytes(b"".join(state.blocks()))
                state = ServerState.from_model(open_model(tmp_path / "state"))
        return model

    assert torch.equal(play(restart=True), play(restart=False))


def test_centred_clipping_starts_from_the_last_aggregate() -> None:
    plan = make_plan(job('[aggregation]\nrule = "centred_clipping"\nparameters = { tau = 1.0 }'), 3)
    rows = torch.full((3, 1), 10.0)
    first = run(plan, rows, torch.zeros(1), initial_server_state(plan, 1), 1)
    second = run(plan, rows, torch.zeros(1), first.state, 2)
    assert second.vector.item() > first.vector.item()


PRIVATE = """
rounds = 50
[cohort]
strategy = "{strategy}"
{cohort}
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client"
clip_norm = 2.0
delta = 1e-5
{noise}
"""


def private(strategy: str = "poisson", noise: str = "epsilon = 4.0", cohort: str = "") -> JobConfig:
    cohort = cohort or ("probability = 0.1" if strategy == "poisson" else "size = 100")
    return job(PRIVATE.format(strategy=strategy, noise=noise, cohort=cohort).removeprefix("\n"))


@pytest.mark.parametrize("strategy", ["poisson", "uniform", "round_robin"])
def test_solved_noise_spends_the_budget_and_no_more(strategy: str) -> None:
    central = make_plan(private(strategy), population=1000).noise
    assert isinstance(central, FreshNoise)
    spent = compose([central.charge.repeated(50)], 1e-5)
    assert 3.98 < spent <= 4.0
    # Under replacement of one silo the sum moves by 2C: the charge states half of what is drawn.
    ratio = central.mechanism.noise_multiplier / central.charge.parts[0][1]
    assert ratio == pytest.approx(2.0 if strategy == "uniform" else 1.0)


@pytest.mark.parametrize("strategy", ["poisson", "uniform"])
def test_a_stated_population_amplifies_nothing(strategy: str) -> None:
    """The draw is from the silos that there are: to state more of them must not make epsilon smaller."""
    plain = make_plan(private(strategy, "noise_multiplier = 1.0"), population=1000).noise
    stated = private(strategy, "noise_multiplier = 1.0\npopulation = 50000")
    assert isinstance(plain, FreshNoise)
    assert make_plan(stated, population=1000).noise == plain
    with pytest.raises(ConfigError, match="not below 1 / 200000"):
        make_plan(private(strategy, "noise_multiplier = 1.0\npopulation = 200000"), population=1000)


def test_central_noise_has_the_stated_spread_and_a_fixed_denominator() -> None:
    plan = make_plan(private(noise="noise_multiplier = 1.5"), population=1000)
    rows = torch.zeros(2, 40_000)
    result = combine(
        plan,
        Rows(TensorMatrix(rows), updates(1, 10**6)),
        torch.zeros(40_000),
        initial_server_state(plan, 40_000),
        round=1,
        seed=0,
        noise=SecureNoise(),
    )
    assert result.vector.std().item() == pytest.approx(1.5 * 2.0 / 100, rel=0.03)
    assert result.account.charge["standard_deviation"] == pytest.approx(0.03)
    assert result.account.charge["guarantee"] is True


def test_one_silo_moves_the_private_sum_by_no_more_than_the_clip_norm() -> None:
    plan = make_plan(private(noise="noise_multiplier = 1.0"), population=1000)
    honest = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))

    def outcome(row: torch.Tensor, examples: int) -> torch.Tensor:
        rows = torch.cat([honest, row[None]])
        counts = updates(10, 10, 10, 10, 10, examples)
        state = initial_server_state(plan, 64)
        return combine(
            plan,
            Rows(TensorMatrix(rows), counts),
            torch.zeros(64),
            state,
            round=1,
            seed=0,
            noise=SeededNoise(9),
        ).vector

    absent = outcome(torch.zeros(64), 1)
    hostile = outcome(torch.full((64,), 1e6), 2**50)
    assert torch.linalg.vector_norm(hostile - absent).item() <= 2.0 / 100 * (1 + 1e-4)


def test_an_empty_poisson_cohort_is_pure_noise() -> None:
    plan = make_plan(private(noise="noise_multiplier = 1.0"), population=1000)
    state = initial_server_state(plan, 30_000)
    result = combine(
        plan,
        Rows(TensorMatrix(torch.empty(0, 30_000)), []),
        torch.zeros(30_000),
        state,
        round=1,
        seed=0,
        noise=SecureNoise(),
    )
    assert result.vector.std().item() == pytest.approx(0.02, rel=0.05)


def test_adaptive_clipping_passes_from_round_to_round_and_is_charged() -> None:
    plan = make_plan(private(noise='noise_multiplier = 1.0\nclipping = "adaptive"'), population=1000)
    assert isinstance(plan.noise, FreshNoise)
    assert "clip_bit" in dict(plan.noise.charge.parts)
    state = initial_server_state(plan, 4)
    assert state.clip_norm == 2.0
    for number in range(1, 15):
        rows = torch.full((100, 4), 1e-3)
        state = combine(
            plan,
            Rows(TensorMatrix(rows), updates(*[1] * 100)),
            torch.zeros(4),
            state,
            round=number,
            seed=0,
            noise=SeededNoise(number),
        ).state
    assert state.clip_norm is not None
    assert state.clip_norm < 0.6, "all updates are far inside the bound, so it shrinks"


@pytest.mark.parametrize(
    ("replace", "by", "message"),
    [
        ('weighting = "uniform"', 'weighting = "examples"', "claim any weight"),
        ('weighting = "uniform"', 'weighting = "uniform"\nrule = "median"', "another sensitivity"),
        ("every = 0", "every = 1", "evaluation.every = 0"),
        ("[privacy]", '[stop]\nmetric = "accuracy"\ntarget = 0.9\n[privacy]', "stop.metric"),
        ("delta = 1e-5", "delta = 0.01", "not below"),
    ],
)
def test_settings_that_break_the_guarantee_are_refused(replace: str, by: str, message: str) -> None:
    text = PRIVATE.format(strategy="poisson", noise="epsilon = 4.0", cohort="probability = 0.1")
    assert replace in text
    with pytest.raises(PrivacyError, match=message):
        make_plan(job(text.replace(replace, by).removeprefix("\n")), population=1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[aggregation]\nrule = "trimed_mean"', "trimmed_mean"),
        ('[aggregation]\nrule = "trimmed_mean"\nparameters = { g = 1 }', "g"),
        ("[aggregation]\npre = [{ f = 1 }]", "table with a name"),
        ('[aggregation.server_optimizer]\nname = "fedadam"\nmomentum = 0.5', "momentum"),
    ],
)
def test_aggregation_that_cannot_work_is_refused_before_the_first_round(text: str, message: str) -> None:
    with pytest.raises((ConfigError, AggregationError), match=message):
        make_plan(job(text), population=10)


def test_a_mean_of_unseen_updates_takes_the_optimizers_step() -> None:
    text = '[aggregation.server_optimizer]\nname = "fedavgm"\nlearning_rate = 0.5\nmomentum = 0.9'
    plan = make_plan(job(text), population=3)
    mean, model = torch.tensor([1.0, -2.0]), torch.tensor([10.0, 20.0])
    first = combine(
        plan, Mean(mean.clone(), account={"silos": 3}), model, initial_server_state(plan, 2), round=1, seed=0
    )
    assert first.vector.tolist() == [10.5, 19.0]
    assert first.account.charge == {"silos": 3}
    assert not first.account.weights
    seen = combine(
        plan,
        Rows(TensorMatrix(mean[None]), updates(1)),
        model,
        initial_server_state(plan, 2),
        round=1,
        seed=0,
    )
    assert torch.equal(seen.vector, first.vector)
    big = torch.full((2,), 3e38)
    with pytest.raises(AggregationError, match="new model is not finite"):
        combine(plan, Mean(big), big, first.state, round=2, seed=0)
    with pytest.raises(AggregationError, match="mean of the round's updates is not finite"):
        combine(plan, Mean(mean / 0), model, first.state, round=2, seed=0)


SECURE = "[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 1.0\n"
QUIET = "[evaluation]\nevery = 0\n"
SUMMED = "[evaluation]\nbounds = { accuracy = 1.0 }\n"
NOISY = "[privacy]\nlevel = 'distributed'\nclip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 1.0\n"


def test_secure_aggregation_needs_little() -> None:
    plan = make_plan(job(SECURE + QUIET), population=3)
    assert masking_of(plan.privacy) == Masking(1.0, None, None, 0.3, 32)
    assert plan.noise == NoiseElsewhere()
    make_plan(job('[stop]\nmetric = "accuracy"\n' + SUMMED + SECURE), population=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SECURE, r"evaluation\.bounds = .* or set evaluation\.every = 0"),
        (QUIET + SECURE + '[stop]\nmetric = "loss"', "test metrics of single silos"),
        (SUMMED, r"evaluation\.bounds: .* this job does not ask for"),
        (SUMMED + SECURE + "public_evaluation = true", "leave one of the two out"),
        (
            SUMMED + SECURE + '[stop]\nmetric = "loss"',
            r"stop\.metric = 'loss' .* \(evaluation\.bounds: accuracy\)",
        ),
        (SUMMED + NOISY, "more than the noise allows; leave bounds out and set evaluation.every = 0"),
        (SUMMED + '[round]\nmode = "buffered"\nbuffer = 3\n' + SECURE, "evaluation.bounds: with round.mode"),
        (QUIET + SECURE + '[aggregation]\nrule = "median"', "only their mean can be had"),
        (QUIET + SECURE + '[aggregation]\npre = [{ name = "nnm", f = 1 }]', "1 pre-aggregations"),
        (QUIET + SECURE + '[aggregation]\nweighting = "inverse_loss"', "nor its loss"),
        (QUIET + SECURE + "[aggregation.validation]\nmax_norm = 1.0", "silos clip to clip_norm"),
        (QUIET + SECURE + "[cohort]\nsize = 2", "fewer than 3 silos"),
        (QUIET + SECURE + "[cohort]\nsize = 3\nover_selection = 1.5", "leave it at 1"),
        (QUIET + SECURE + '[cohort]\nstrategy = "data_size"', "example counts stay hidden"),
        (QUIET + SECURE + '[transfer]\nup = "bfloat16"', "masked vectors travel"),
    ],
)
def test_secure_aggregation_refuses_what_makes_no_sense_with_it(text: str, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        make_plan(job(text), population=5)


@pytest.mark.parametrize("probability", [0.0005, 0.0015, 0.01234])
def test_the_charge_states_the_rate_that_the_sampler_uses(probability: float) -> None:
    table = private(noise="noise_multiplier = 1.0", cohort=f"probability = {probability}")
    charge = make_plan(table, population=1000).charge_of(1)
    assert charge is not None
    assert charge.rate == pytest.approx(probability, rel=1e-12)


EF21 = """
[cohort]
size = 2
minimum = 2
[aggregation]
weighting = "uniform"
[aggregation.validation]
norm_ratio = "off"
[transfer]
up = "topk(ratio=0.5)"
feedback = "ef21"
"""


def test_ef21_adds_the_mean_of_the_differences_to_what_was_sent_before(tmp_path: Path) -> None:
    """The model moves by G, the mean of all that each silo has sent; the state goes on as an artifact."""
    plan = make_plan(job(EF21), population=2)
    model, state, sent = torch.zeros(2), initial_server_state(plan, 2), torch.zeros(2, 2)
    expected = torch.zeros(2)
    for number, rows in enumerate(torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(0)), start=1):
        (tmp_path / "state").write_bytes(b"".join(state.blocks()))
        stored = ServerState.from_model(open_model(tmp_path / "state"))
        result = run(plan, rows, model, stored, number)
        model, state = result.vector, result.state
        sent += rows
        expected += sent.mean(0)
        torch.testing.assert_close(model, expected)
        torch.testing.assert_close(state.estimate, sent.mean(0))
    assert state.silos == ("silo-0", "silo-1")
    with pytest.raises(AggregationError, match="silo-2 was in one of the two last only"):
        run(plan, torch.zeros(3, 2), model, state, 5)
    broken = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
    with pytest.raises(AggregationError, match="and that of silo-1 is out"):
        run(plan, broken, model, state, 5)
