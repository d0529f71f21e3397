"""Dropout over ranks: alike where activations are, independent elsewhere, and computed again the same."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from cluster_cases import Case
from cluster_masks import interrupted, masks, outcomes
from cluster_models import Language, Masking, Noisy, NoisyGates, NoisyMixture
from cluster_plans import plan
from ranks import run_ranks

from roundtable.cluster.parallel.pipeline_stages import FixedOutput
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.stepping.agreed_step import PendingFigures
from roundtable.core.errors import TaskError

STEPS = {"steps": 1, "batch_size": 8, "learning_rate": 0.1}
KEPT = 0.7
# Two independent masks agree where both keep or both drop.
INDEPENDENT = KEPT**2 + (1 - KEPT) ** 2


def noisy(name: str, strategy: Strategy, steps: int = 1) -> Case:
    return Case(name, strategy, Language(kind=Noisy, dtype=torch.float64), {**STEPS, "steps": steps})


def agreement(one: list[bool], other: list[bool]) -> float:
    assert len(one) == len(other) > 500
    assert sum(one) / len(one) == pytest.approx(KEPT, abs=0.06)
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def independent(one: list[bool], other: list[bool]) -> bool:
    return abs(agreement(one, other) - INDEPENDENT) < 0.08


def test_masks_are_alike_where_activations_are_and_nowhere_else() -> None:
    cases = [
        noisy("tp", plan(tp=2, micro=4)),
        noisy("sequence", plan(tp=2, micro=4, sequence_parallel=True)),
        noisy("ddp", plan("ddp", dp=2, micro=2)),
        noisy("zero3", plan("zero3", fsdp=2, micro=2)),
        noisy("1f1b", plan(pp=2, micro=4)),
        Case("gates", plan(tp=2, micro=4), Language(kind=NoisyGates, dtype=torch.float64), STEPS),
    ]
    first, second = run_ranks(masks, 2, cases)
    block = "blocks.1."
    whole = {"early", block + "residual", block + "feed_forward.before", block + "feed_forward.after"}
    for name, alike in [("tp", whole), ("sequence", {"early", block + "feed_forward.before"})]:
        for place in (*whole, block + "feed_forward.inside"):
            pairs = zip(first[name][place], second[name][place], strict=True)
            for one, other in pairs:
                assert one == other if place in alike else independent(one, other), (name, place)
    for name in ("ddp", "zero3"):
        for place, passes in first[name].items():
            assert independent(passes[0], second[name][place][0]), (name, place)
            assert independent(passes[0], passes[1]), (name, place)
    inside = block + "feed_forward.inside"
    assert independent(first["gates"][inside][0], second["gates"][inside][0])
    # In its first pass torch asks for the shapes that stages exchange.
    _, one, two = first["1f1b"]["blocks.0.residual"]
    _, other, _ = second["1f1b"]["blocks.2.residual"]
    assert independent(one, two)
    assert independent(one, other)


# Products of meshes on four ranks: (strategy, ranks that have the same examples and blocks).
PRODUCTS = {
    "hsdp": (plan("zero3", dp=2, fsdp=2), ()),
    "zero2": (plan("zero2", fsdp=4, micro=2), ()),
    "zero1": (plan("zero1", dp=4, micro=2), ()),
    "dp tp": (plan("zero2", dp=2, tp=2), ((0, 1), (2, 3))),
    "zero3 tp": (plan("zero3", fsdp=2, tp=2), ((0, 1), (2, 3))),
    "pp tp": (plan(pp=2, tp=2, micro=4), ((0, 1), (2, 3))),
    "pp zero2": (plan("zero2", pp=2, fsdp=2), ()),
    "interleaved": (plan("zero2", pp=2, fsdp=2, schedule="interleaved", virtual_stages=2, micro=2), ()),
    "ep": (plan("zero3", fsdp=4, ep=2), ()),
}


@pytest.mark.slow
def test_products_of_strategies_draw_alike_where_both_would_and_nowhere_else() -> None:
    cases = [
        Case(name, PRODUCTS[name][0], Language(kind=Noisy, block=NoisyMixture, dtype=torch.float64), STEPS)
        if name == "ep"
        else noisy(name, PRODUCTS[name][0])
        for name in PRODUCTS
    ]
    found = run_ranks(masks, 4, cases)
    for name, (strategy, alike) in PRODUCTS.items():
        for one, other in combinations(range(4), 2):
            first, second = found[one][name], found[other][name]
            assert first.keys() == second.keys() or strategy.mesh.pp > 1
            for place in first.keys() & second.keys():
                # The last pass: in a pipeline's first one torch asks for shapes.
                pair = first[place][-1], second[place][-1]
                same = (one, other) in alike and not place.endswith("inside")
                assert pair[0] == pair[1] if same else independent(*pair), (name, place, one, other)
        # What one rank draws in its places is no stream begun anew.
        for places in (found[0][name], found[3][name]):
            residuals = [passes[-1] for place, passes in places.items() if place.endswith("residual")]
            assert all(independent(*pair) for pair in combinations(residuals, 2)), name


def kinds(strategy: Strategy, kind: str) -> Strategy:
    return Strategy.from_plain({**strategy.to_plain(), "checkpointing": kind})


PLANS = {
    "ddp": plan("ddp", dp=2),
    "zero3": plan("zero3", fsdp=2),
    "sequence": plan(tp=2, sequence_parallel=True),
    "1f1b": plan(pp=2, micro=4),
}


@pytest.mark.parametrize(
    "again",
    [
        ["ddp every", "zero3 selective", "sequence every", "1f1b sqrt"],
        pytest.param(
            [f"{name} {kind}" for name in PLANS for kind in ("every", "selective", "sqrt")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "all"],
)
def test_checkpointing_computes_the_same_masks_again(again: list[str]) -> None:
    cases = [noisy(name, strategy, steps=2) for name, strategy in PLANS.items()]
    cases += [noisy(name, kinds(PLANS[name.split()[0]], name.split()[1]), steps=2) for name in again]
    for found in run_ranks(outcomes, 2, cases):
        for name in again:
            assert found[name] == found[name.split()[0]], name


def test_a_round_that_goes_on_in_its_middle_draws_the_same() -> None:
    cases = [noisy(name, PLANS[name], steps=2) for name in ("sequence", "1f1b")]
    for found in run_ranks(interrupted, 2, cases):
        for name, (whole, parts) in found.items():
            assert whole == parts, name


def test_ranks_that_share_layers_keep_the_same_norms_and_losses() -> None:
    cases = [noisy("tp", plan(tp=2)), noisy("sequence", plan(tp=2, sequence_parallel=True))]
    first, second = run_ranks(outcomes, 2, cases)
    for name in ("tp", "sequence"):
        assert first[name][0] == second[name][0]
        for key, values in first[name][1].items():
            if "norm" in key or key.endswith("w2.bias"):
                assert values == pytest.approx(second[name][1][key], rel=1e-12), key


def test_a_loss_that_draws_is_the_same_on_the_first_stage_and_the_last() -> None:
    cases = [
        Case(name, strategy, Masking(dtype=torch.float64), {**STEPS, "steps": 2})
        for name, strategy in [("one stage", plan("ddp", dp=2, micro=4)), ("1f1b", plan(pp=2, micro=4))]
    ]
    for found in run_ranks(outcomes, 2, cases):
        # 16 tokens of 64 kinds, three in ten of them counted: the loss of guessing, however they are drawn.
        for name in ("one stage", "1f1b"):
            assert found[name][0] / 16 == pytest.approx(0.3 * 4.3, rel=0.25), name


def test_a_loss_that_changes_its_mind_is_told() -> None:
    model = FixedOutput(torch.zeros(2), (torch.ones(2),))
    assert torch.equal(model(torch.ones(2)), torch.zeros(2))
    with pytest.raises(TaskError, match="different inputs for one batch"):
        model(torch.zeros(2))
    # In training with a step's other figures, for which a device is not waited for.
    later = FixedOutput(torch.zeros(2), (torch.ones(2),), later=True)
    for given in (torch.ones(2), torch.zeros(2)):
        later(given)
    with pytest.raises(TaskError, match="different inputs for one batch"):
        later(torch.ones(3))
    assert PendingFigures(torch.zeros(5), None, 1).read().sound
    with pytest.raises(TaskError, match="different inputs for one batch"):
        PendingFigures(torch.zeros(5), None, 1, differs=later.differs).read()
