"""What silos put into a secure sum and what the coordinator reads out of it, without the protocol between."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, InvalidUpdate, PrivacyError
from roundtable.core.seeds import numpy_generator
from roundtable.privacy import Charge, SecureRound, SeededNoise, why_not_masked
from roundtable.privacy.secagg import plain_sum

COLUMNS = 1000
EXAMPLES = (10, 1, 300, 70)


NOISY = 'level = "distributed"'
MASKED = 'level = "none"\nsecure_aggregation = true\n'


def job(text: str = "clip_norm = 2.0", before: str = "", level: str = MASKED) -> JobConfig:
    return parse_job(f'task = "t"\n{before}\n[privacy]\n{level}\n{text}')


def vectors(silos: int, norm: float = 1.5) -> np.ndarray:
    rows = numpy_generator(5, "rows").normal(size=(silos, COLUMNS)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) * np.float32(norm)


def test_the_mean_is_weighted_by_examples_within_the_error_that_is_stated() -> None:
    round, rows = SecureRound.of(job(), COLUMNS, 4, 1), vectors(4)
    losses = (0.5, 2.0, 1.0, None)
    sources = [round.encode(*given) for given in zip(rows, EXAMPLES, losses, strict=True)]
    mean = round.decode(plain_sum(sources, round.parameters).total, 4, 4)
    weights = np.array(EXAMPLES) / sum(EXAMPLES)
    bound = 4 * 2.0 / (((1 << 32) - 1) // (2 * 4 * round.parameters.weight_bound) * sum(EXAMPLES))
    assert np.abs(mean.vector.numpy() - weights @ rows.astype(np.float64)).max() <= bound + 1e-7
    total, count = mean.training["loss"]
    assert (count, total) == (311, pytest.approx(10 * 0.5 + 2.0 + 300.0, abs=1e-2))
    assert mean.account == {"silos": 4, "cohort": 4, "weight": 381, "examples": 381, "clipped": 0}


def test_metrics_of_the_model_before_the_round_are_summed_as_plain_ones_are() -> None:
    bounds = "[evaluation]\nevery = 2\nbounds = { loss = 20.0, accuracy = 1.0 }"
    rounds = [SecureRound.of(job(before=bounds), COLUMNS, 4, number) for number in (1, 2, 3)]
    assert (
        rounds[0].length == rounds[2].length > rounds[1].length == SecureRound.of(job(), COLUMNS, 4, 2).length
    )
    assert not rounds[1].bounds
    found = (
        {"accuracy": (7.0, 10), "loss": (3.25, 10)},
        {
            "accuracy": (1e6, 1 << 30),
            "loss": (-500.0, 2),
        },  # More examples than count, and a loss beyond its bound.
        {"accuracy": (math.nan, 5), "loss": (0.0, 0)},
        {},
    )
    sources = [
        rounds[0].encode(row, n, 1.0, before)
        for row, n, before in zip(vectors(4), EXAMPLES, found, strict=True)
    ]
    mean = rounds[0].decode(plain_sum(sources, rounds[0].parameters).total, 4, 4)
    most, error = 1 << 24, 4 * 2.0**-15
    accuracy = 7.0 + most * 1e6 / (1 << 30)
    assert mean.before == {
        "accuracy": (pytest.approx(accuracy, abs=error), 10 + most),
        "loss": (pytest.approx(3.25 - 2 * 20.0, abs=20 * error), 12),
    }
    assert mean.training["loss"][1] == 381


@pytest.mark.parametrize(("ring", "silos"), [(8, 10), (12, 20), (16, 20)])
def test_small_rings_give_the_mean_within_the_error_that_the_plan_states(ring: int, silos: int) -> None:
    """The vector is that many bits shorter, and what the plan says of the error holds."""
    uniform = '[aggregation]\nweighting = "uniform"'
    small = job(f"clip_norm = 2.0\nring_bits = {ring}", uniform)
    round, rows = SecureRound.of(small, COLUMNS, silos, 3), vectors(silos, 5.0)
    sources = [round.encode(row, 7, 0.5) for row in rows]
    assert len(sources[0]) == round.length
    assert round.upload_bytes == (round.length * ring + 7) // 8 < 4 * COLUMNS * (ring + 4) // 32
    mean = round.decode(plain_sum(sources, round.parameters).total, silos, silos)
    exact = rows.mean(0, dtype=np.float64) * 2.0 / 5.0
    error = float(np.linalg.norm(mean.vector.numpy() - exact))
    assert error < round.quantiser.expected_error(COLUMNS, silos)
    assert mean.account["clipped"] == silos
    assert mean.training["loss"] == (pytest.approx(0.5 * silos, abs=1e-2), silos)


def test_the_rotation_is_the_jobs_and_the_rounds() -> None:
    uniform = '[aggregation]\nweighting = "uniform"'
    small = job("clip_norm = 2.0\nring_bits = 8", uniform)
    seeds = {SecureRound.of(small, COLUMNS, 4, number).rotation for number in (1, 2, 3)}
    assert len(seeds) == 3
    assert SecureRound.of(job(), COLUMNS, 4, 1).rotation == b""


def test_weights_are_bounded_and_uniform_ones_are_one() -> None:
    round, rows = SecureRound.of(job(), COLUMNS, 4, 1), vectors(4)
    bound = round.parameters.weight_bound
    sources = [round.encode(row, 10**9, 1.0) for row in rows]
    account = round.decode(plain_sum(sources, round.parameters).total, 4, 4).account
    assert (account["weight"], account["examples"]) == (4 * bound, 4 * 10**9)
    uniform = SecureRound.of(job(before='[aggregation]\nweighting = "uniform"'), COLUMNS, 4, 1)
    sources = [uniform.encode(row, n, 1.0) for row, n in zip(rows, EXAMPLES, strict=True)]
    mean = uniform.decode(plain_sum(sources, uniform.parameters).total, 4, 4)
    assert mean.account["weight"] == 4
    assert torch.allclose(mean.vector, torch.from_numpy(rows.mean(axis=0)), atol=1e-7)


def test_clipped_silos_are_counted() -> None:
    round = SecureRound.of(job(), COLUMNS, 3, 1)
    rows = np.concatenate([vectors(2), vectors(1, norm=20.0)])
    mean = round.decode(plain_sum([round.encode(r, 1, 0.0) for r in rows], round.parameters).total, 3, 3)
    assert mean.account["clipped"] == 1
    expected = (rows[:2].sum(axis=0) + rows[2] / 10) / 3
    assert np.abs(mean.vector.numpy() - expected).max() <= 2.0 / 10922


def test_an_update_that_is_not_finite_is_refused_at_the_silo() -> None:
    round = SecureRound.of(job(), COLUMNS, 3, 1)
    with pytest.raises(InvalidUpdate, match="not finite"):
        round.encode(np.full(COLUMNS, np.nan, dtype=np.float32), 1, 0.0)


def test_a_sum_that_no_honest_silos_make_is_refused() -> None:
    round = SecureRound.of(job(), COLUMNS, 3, 1)
    total = plain_sum([round.encode(row, 1, 0.0) for row in vectors(3)], round.parameters).total
    total[COLUMNS] = 0
    with pytest.raises(AggregationError, match="total weight of 0"):
        round.decode(total, 3, 3)


def test_two_silos_hide_nothing() -> None:
    with pytest.raises(PrivacyError, match="at least 3 silos"):
        SecureRound.of(job(), COLUMNS, 2, 1)


@pytest.mark.parametrize("silos", [3, 4, 7, 50, 51, 200])
def test_every_cohort_has_parameters_and_enough_precision(silos: int) -> None:
    round = SecureRound.of(job(), COLUMNS, silos, 1)
    assert round.parameters.privacy_failure() < -39.9
    assert round.parameters.least <= silos
    assert ((1 << 32) - 1) // (2 * silos * round.parameters.weight_bound) >= 1 << 13


def test_shares_of_noise_carry_no_exact_numbers_beside_them() -> None:
    text = "clip_norm = 1.0\nnoise_multiplier = 0.5\ndelta = 1e-5"
    round = SecureRound.of(job(text, "[cohort]\nsize = 4", NOISY), COLUMNS, 4, 1)
    assert round.length == 1024
    with_bounds = "[evaluation]\nbounds = { accuracy = 1.0 }\n[cohort]\nsize = 4"
    claimed = SecureRound.of(job(text, with_bounds, NOISY), COLUMNS, 4, 1)
    assert (claimed.length, claimed.bounds) == (1024, {}), "no coordinator gets metrics beside the noise"
    rows = vectors(4, norm=0.9)
    sources = [round.encode(row, 7, 1.0, noise=SeededNoise(1, i)) for i, row in enumerate(rows)]
    mean = round.decode(plain_sum(sources, round.parameters).total, 4, 4)
    noise = mean.vector.numpy() - rows.mean(axis=0)
    # Each share has half the variance (0.5 · 1)²: one of four may be lost, and one may collude.
    assert noise.std() == pytest.approx(0.5 * math.sqrt(4 / 2) / 4, rel=0.1)
    assert not mean.training
    assert Charge.from_json(mean.account["charge"]).mechanism == "skellam"


def test_shares_of_noise_need_a_cohort_of_a_known_size() -> None:
    text = "clip_norm = 1.0\nnoise_multiplier = 0.5\ndelta = 1e-5"
    with pytest.raises(PrivacyError, match=r"cohort\.size is missing"):
        SecureRound.of(job(text, level=NOISY), COLUMNS, 4, 1)


def test_the_assumed_corruption_decides_the_threshold() -> None:
    default = SecureRound.of(job(), COLUMNS, 9, 1).parameters
    wary = SecureRound.of(job("clip_norm = 2.0\ncorruption = 0.6"), COLUMNS, 9, 1).parameters
    assert (default.corrupt, wary.corrupt) == (3, 5)
    assert wary.t > default.t
    with pytest.raises(PrivacyError, match="8 of 9 silos corrupt"):
        SecureRound.of(job("clip_norm = 2.0\ncorruption = 0.9"), COLUMNS, 9, 1)


def test_noise_below_the_promise_is_never_unmasked() -> None:
    """With few dropouts allowed for, the threshold of the shares alone would let too little noise through."""
    text = "clip_norm = 1.0\nnoise_multiplier = 0.5\ndelta = 1e-5"
    round = SecureRound.of(
        job(text + "\ndropout_tolerance = 0.1", "[cohort]\nsize = 20", NOISY), COLUMNS, 20, 1
    )
    assert round.parameters.t == 14
    assert round.fewest == 18


@pytest.mark.parametrize("ring", ["", "ring_bits = 12"])
def test_of_random_k_only_the_values_that_are_sent_are_masked(ring: str) -> None:
    """One of four neighbours, the same for all silos; what the mean stands for is four times that."""
    up = '[aggregation]\nweighting = "uniform"\n[transfer]\nup = "randomk(ratio=0.25, indices=cohort)"'
    rows = vectors(4)
    rounds = [SecureRound.of(job(f"clip_norm = 2.0\n{ring}", up), COLUMNS, 4, number) for number in (1, 2)]
    whole = SecureRound.of(
        job(f"clip_norm = 2.0\n{ring}", up.replace("randomk(ratio=0.25, indices=cohort)", "float32")),
        COLUMNS,
        4,
        1,
    )
    seen = []
    for round in rounds:
        assert round.values == COLUMNS // 4
        assert round.upload_bytes < 0.35 * whole.upload_bytes
        total = plain_sum([round.encode(row, 1, None) for row in rows], round.parameters).total
        mean = round.decode(total, 4, 4).vector.numpy()
        places = np.flatnonzero(mean)
        # Rounding at random may make a value zero.
        assert 0.95 * round.values < len(np.unique(places // 4)) == len(places)
        np.testing.assert_allclose(mean[places], 4 * rows.mean(0)[places], atol=1e-2)
        seen.append(set(places.tolist()))
    assert seen[0] != seen[1]
    # All silos miss the same values: the error of the mean is that of one, and no average of four.
    error = np.linalg.norm(mean - rows.mean(0)) / np.linalg.norm(rows.mean(0))
    assert error == pytest.approx(3**0.5, rel=0.15)


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        (
            'up = "topk(ratio=0.1)"\nfeedback = "off"',
            "each silo sends values of its own choice, which tells of",
        ),
        (
            'up = "randomk(ratio=0.1)"',
            "each silo sends other values, which do not add up; set indices=cohort",
        ),
        (
            'up = "randomk(ratio=0.1, indices=cohort) | int8"',
            "or choose randomk(ratio=..., indices=cohort) alone",
        ),
        ('up = "randomk(ratio=0.1, indices=cohort, scaled=false)"', "what of its own update was counted"),
        ('up = "lowrank(rank=2)"', "do not add up; set lowrank(rank=..., basis=cohort)"),
        ('up = "int4"', "masked vectors travel in a form of their own"),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_reason(transfer: str, reason: str) -> None:
    assert reason in why_not_masked(job(before=f"[transfer]\n{transfer}"))
