"""Groups whose secure sums a robust rule sees: against the arithmetic written out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundtable.aggregation import TensorMatrix
from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, PrivacyError
from roundtable.core.layout import Layout
from roundtable.engine import (
    GroupMeans,
    combine,
    initial_server_state,
    make_plan,
)
from roundtable.engine.validation.round_noise import NoiseInShares
from roundtable.engine.validation.secure_feasibility import (
    fewest,
    fewest_groups,
    fewest_updates,
    least_of_groups,
    most_bytes,
    secure_summary,
)
from roundtable.privacy import SecureMean, SecureRound, compose
from roundtable.privacy.secagg import Least
from roundtable.privacy.secagg.quantise import QuantisedUpdate

TABLE = """
task = "t"
[cohort]
{cohort}
[evaluation]
every = 0
[aggregation]
rule = "{rule}"
parameters = {{ {parameters} }}
weighting = "{weighting}"
[privacy]
clip_norm = 2.0
{level}
{privacy}
"""


def job(
    rule: str = "trimmed_mean",
    parameters: str = "f = 1",
    privacy: str = "group_size = 3",
    cohort: str = "size = 12",
    weighting: str = "examples",
    level: str = 'level = "none"\nsecure_aggregation = true',
) -> JobConfig:
    tables = {"rule": rule, "parameters": parameters, "privacy": privacy, "cohort": cohort}
    return parse_job(TABLE.format(**tables, weighting=weighting, level=level))


def means_of(rows: np.ndarray, weights: list[int], spoiled: int | None = None) -> GroupMeans:
    decoded: list[tuple[tuple[str, ...], SecureMean | str]] = []
    for number, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        members = tuple(f"silo-{number}{letter}" for letter in "abc")
        account = {"silos": 3, "cohort": 3, "weight": weight, "examples": weight, "clipped": 1}
        told = SecureMean(torch.from_numpy(row), 3, {"loss": (2.0 * weight, weight)}, account)
        decoded.append((members, "too heavy" if number == spoiled else told))
    matrix = torch.from_numpy(rows.copy())
    if spoiled is not None:
        matrix[spoiled] = torch.nan
    return GroupMeans.of(TensorMatrix(matrix), decoded, {"silo-x": "its group was lost"})


def outcome(config: JobConfig, means: GroupMeans):
    plan = make_plan(config, population=12)
    model = torch.ones(means.matrix.columns)
    state = initial_server_state(plan, means.matrix.columns)
    return combine(plan, means, model, state, round=1, seed=3, diagnose=False)


def rows(groups: int, columns: int = 50) -> np.ndarray:
    return np.random.default_rng(groups).normal(size=(groups, columns)).astype(np.float32)


def test_the_trimmed_mean_is_over_groups_each_counted_once() -> None:
    given = rows(5)
    given[2] = 1e6
    result = outcome(job(), means_of(given, [10, 1, 10**6, 30, 4]))
    expected = 1 + np.sort(given.astype(np.float64), axis=0)[1:-1].mean(axis=0)
    np.testing.assert_allclose(result.vector.numpy(), expected, rtol=1e-5)
    assert result.account.excluded == {"silo-x": "its group was lost"}
    groups = result.account.charge["groups"]
    assert [group["weight"] for group in groups] == [10, 1, 10**6, 30, 4]
    assert groups[2]["members"] == ["silo-2a", "silo-2b", "silo-2c"]
    assert result.account.charge | {"silos": 15, "cohort": 16, "clipped": 5} == result.account.charge


def test_a_rule_that_chooses_rows_names_the_groups_that_it_left_out() -> None:
    given = rows(5)
    given[3] = -50.0
    result = outcome(job(rule="multi_krum", cohort="size = 15"), means_of(given, [1] * 5))
    shares = [group["share"] for group in result.account.charge["groups"]]
    assert shares[3] == 0.0
    assert sum(shares) == pytest.approx(1.0)
    kept = given[[share > 0 for share in shares]].astype(np.float64)
    np.testing.assert_allclose(result.vector.numpy(), 1 + kept.mean(axis=0), rtol=1e-4, atol=1e-6)


def test_a_spoiled_group_is_one_of_the_hostile() -> None:
    given = rows(5)
    result = outcome(job(), means_of(given, [1] * 5, spoiled=1))
    rest = np.delete(given, 1, axis=0).astype(np.float64)
    np.testing.assert_allclose(result.vector.numpy(), 1 + rest.mean(axis=0), rtol=1e-5)
    assert result.account.excluded["silo-1b"] == "the sum of its group: too heavy"
    means = means_of(given, [1] * 5, spoiled=1)
    means.matrix.block(0, 50)[4] = torch.nan
    with pytest.raises(AggregationError, match="more than the f = 1"):
        outcome(job(), means)


def test_training_losses_of_the_groups_add_up() -> None:
    means = means_of(rows(4), [1, 2, 3, 4], spoiled=0)
    assert means.training == {"loss": (18.0, 9)}
    assert means.account["examples"] == 9


def test_group_robust_with_a_rule_inside() -> None:
    given = rows(5)
    config = job(rule="group_robust", parameters='f = 1, rule = "median"')
    result = outcome(config, means_of(given, [1] * 5))
    np.testing.assert_allclose(result.vector.numpy(), 1 + np.median(given, axis=0), rtol=1e-5)


def test_what_a_job_with_groups_cannot_do_without() -> None:
    assert (fewest(job()), fewest_groups(job()), fewest_updates(job(), 12)) == (9, 3, 9)
    assert least_of_groups(job(), 12) == Least(3, 9)
    assert least_of_groups(job(cohort="size = 12\nminimum = 11"), 12) == Least(3, 11)
    two = job(parameters="f = 2", privacy="group_size = 4", cohort="size = 20")
    assert (fewest(two), fewest_groups(two)) == (20, 5)
    assert fewest_groups(job(rule="median", parameters="")) == 3


def test_a_round_ends_with_no_fewer_updates_than_can_be_unmasked() -> None:
    """Two thirds and one more on the full graph; on the sparse one what its parameters demand."""
    mean = job(rule="mean", parameters="", privacy="", cohort="")
    assert [fewest_updates(mean, size) for size in (12, 50)] == [9, 34]
    for size in (100, 300):
        parameters = SecureRound.of(mean, 10, size, 1).parameters
        assert fewest_updates(mean, size) == parameters.least > 2 * size // 3 + 1
    assert fewest_updates(job(rule="mean", parameters="", privacy="corruption = 0.99", cohort=""), 100) == 67


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": ""}, "or give privacy.group_size to let the rule see the means of groups"),
        ({"rule": "mean", "parameters": ""}, "a mean of them withstands nobody"),
        ({"cohort": "size = 8"}, "makes 2 groups of 3 .* Ask at least 9 silos"),
        ({"parameters": "f = 2", "cohort": "size = 15"}, "use groups of at least 4"),
        ({"rule": "foolsgold", "parameters": ""}, "follows single silos"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(PrivacyError, match=words):
        make_plan(job(**changes), population=12)


NOISY = 'level = "distributed"\ndelta = 1e-3\n'


def test_noise_is_made_up_within_each_group_and_charged_once() -> None:
    """A silo is in one group only, so that a round costs what the sum of one group does."""
    config = job(privacy="group_size = 4\nnoise_multiplier = 2.0", weighting="uniform", level=NOISY)
    plan = make_plan(config, 12, (slice(0, 50),))
    assert isinstance(plan.noise, NoiseInShares)
    # 70 % of four silos at least are in a group's sum: two shares make up the noise, not eight of twelve.
    assert plan.noise.charge.shares == 2
    alone = job("mean", "", "noise_multiplier = 2.0", "size = 4", "uniform", NOISY)
    small = make_plan(alone, 4, (slice(0, 50),))
    assert isinstance(small.noise, NoiseInShares)
    assert small.noise.charge.shares == 2
    assert compose([plan.noise.charge], 1e-3) == pytest.approx(compose([small.noise.charge], 1e-3), rel=0.02)


def test_noise_for_a_budget_is_solved_for_the_group() -> None:
    config = job(privacy="group_size = 4\nepsilon = 8.0", weighting="uniform", level=NOISY)
    plan = make_plan(config, 12, (slice(0, 50),))
    assert isinstance(plan.noise, NoiseInShares)
    spent = compose([plan.noise.charge.repeated(config.rounds)], 1e-3)
    assert 7.9 < spent <= 8.0


def test_the_promise_is_put_in_words_with_its_probabilities() -> None:
    text = secure_summary(job(), FIFTY)
    assert "groups of 3 silos, full graph, threshold 3" in text
    assert "12 silos make 4 groups" in text
    assert "withstands 1 hostile silos" in text
    assert "with 4 of 12, some group holds more than that with probability" in text
    privacy = "[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 1.0\ndropout_tolerance = 0.1"
    many = parse_job(f'task = "t"\n[cohort]\nsize = 300\n{privacy}')
    assert "privacy fails with probability 2^-4" in secure_summary(many, FIFTY)
    assert secure_summary(parse_job('task = "t"'), FIFTY) == ""


MASKED = 'level = "none"\nsecure_aggregation = true\n'
FIFTY = Layout.of({"w": torch.empty(50)})


@pytest.mark.parametrize(
    ("up", "masked", "most"),
    [
        ("float32", "", 4 * 2048),
        ("int4", "", 1024 + 2 * 32),
        ("auto", "", 4 * 2048),
        ("lowrank(rank=4, basis=cohort)", MASKED, 4 * (4 * 64 + 10)),
    ],
)
def test_the_most_that_a_silo_sends_is_said_before(up: str, masked: str, most: int) -> None:
    privacy = f"[privacy]\n{masked}clip_norm = 1.0\n" if masked else ""
    small = parse_job(f'task = "t"\n[cohort]\nsize = 4\n[transfer]\nup = "{up}"\n{privacy}')
    layout = Layout.of({"w": torch.empty(32, 64)})
    assert most_bytes(small, layout) == pytest.approx(most, abs=40)
    if masked:
        assert "these are factors of 2,048 values, and in even rounds 1,0" in secure_summary(small, layout)


@pytest.mark.parametrize(
    ("ring", "size", "top", "sent"), [(8, 10, 12, 55), (12, 10, 204, 83), (32, 10, 214_748_364, 220)]
)
def test_the_plan_says_levels_bytes_and_error(ring: int, size: int, top: int, sent: int) -> None:
    small = job("mean", "", f"ring_bits = {ring}", f"size = {size}", "uniform", MASKED)
    text = secure_summary(small, FIFTY)
    round = SecureRound.of(small, 50, size, 1)
    assert f"sends {round.upload_bytes:,} bytes" in text
    assert f"{top:,} levels on either side of zero" in text
    assert ("public random rotation" in text) == (ring < 32)
    assert round.upload_bytes >= sent
    error = round.quantiser.expected_error(50, size)
    assert f"({error / 2.0:.2g} of clip_norm)" in text
    assert "times as far" not in text


def test_the_plan_says_how_coarse_a_mean_of_few_examples_is() -> None:
    """The step of the ring is a share of the bound on weights, so silos of w examples are bound / w times as
    coarse: held to sums in the ring."""
    small = parse_job(f'task = "t"\n[cohort]\nsize = 3\n[privacy]\n{MASKED}clip_norm = 2.0')
    assert "655 times as far where silos have 100 examples each" in secure_summary(small, FIFTY)
    quantiser = SecureRound.of(small, 50, 3, 1).quantiser
    vector, chance = np.linspace(-0.2, 0.2, 50), np.random.default_rng(0)

    def error(weight: int) -> float:
        """In root mean square over 40 sums of three such silos."""
        found = []
        for _ in range(40):
            silos = [QuantisedUpdate(vector, weight, quantiser, rounding=chance) for _ in range(3)]
            total = np.sum([each.block(0, 50) for each in silos], axis=0, dtype=np.uint32)
            found.append(np.square(quantiser.decode_sum(total) / (3 * weight) - vector).sum())
        return float(np.sqrt(np.mean(found)))

    assert error(100) / error(65_536) == pytest.approx(655.36, rel=0.3)


@pytest.mark.parametrize(
    ("ring", "size", "weighting", "reason"),
    [(8, 10, "examples", "no room for the examples"), (8, 128, "uniform", "sum of 128 silos")],
)
def test_rings_without_room_are_refused_before_the_first_round(
    ring: int, size: int, weighting: str, reason: str
) -> None:
    small = job("mean", "", f"ring_bits = {ring}", f"size = {size}", weighting, MASKED)
    with pytest.raises(PrivacyError, match=reason):
        make_plan(small, size)
