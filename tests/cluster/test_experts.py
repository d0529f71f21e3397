"""Experts with a capacity and a dynamic router: against one token after another, and over ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster_cases import Balanced, Case, adam, fit_and_report, run_cases
from cluster_models import Language, Limited, Mixture
from cluster_plans import STEPS, plan
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.choice.machine_rates import rates_of
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.choice.step_time import step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.experts import MixtureOfExperts
from roundtable.cluster.parallel.routing import places_at, spread
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.plan.memory_estimate import ModelProbe, estimate
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.task import Site


def one_by_one(choices: list[list[int]], experts: int) -> list[list[int]]:
    """The dynamic router of one example as its sentence says it, without a tensor."""
    tokens, top_k = len(choices), len(choices[0])
    mean = tokens * top_k / experts
    limit = max(math.ceil(mean), int(1.5 * mean))
    load = [sum(choice.count(expert) for choice in choices) for expert in range(experts)]
    here, found = [0] * experts, [list(choice) for choice in choices]
    filled = [min(count, limit) for count in load]
    for turn in range(top_k):
        for token in range(tokens):
            expert = choices[token][turn]
            here[expert] += 1
            if here[expert] > limit:
                other = min(range(experts), key=lambda each: (filled[each], each))
                filled[other] += 1
                if other not in choices[token] and other not in found[token][:turn]:
                    found[token][turn] = other
    return found


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, list[list[list[int]]]]:
    experts = draw(st.integers(2, 6))
    top_k = draw(st.integers(1, experts - 1))
    tokens, examples = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    # Few first choices, so that some experts are crowded.
    orders = st.sampled_from([list(range(experts)), list(range(experts))[::-1], [1, 0, *range(2, experts)]])
    token = orders.map(lambda order: order[:top_k])
    example = st.lists(token, min_size=tokens, max_size=tokens)
    return experts, draw(st.lists(example, min_size=examples, max_size=examples))


@given(choices())
def test_choices_go_as_one_by_one(drawn: tuple[int, list[list[list[int]]]]) -> None:
    experts, chosen = drawn
    found = spread(torch.tensor(chosen), experts)
    assert found.tolist() == [one_by_one(example, experts) for example in chosen]
    places = places_at(found, experts)
    for example, place in zip(found, places, strict=True):
        for expert in range(experts):
            # By choice and then by token.
            there = place.T[expert == example.T].tolist()
            assert there == list(range(len(there)))


def test_what_is_over_capacity_adds_nothing_and_earlier_tokens_stay() -> None:
    torch.manual_seed(1)
    free = MixtureOfExperts(4, 8, 4, top_k=1)
    cut = MixtureOfExperts(4, 8, 4, top_k=1, capacity_factor=1.0)
    cut.load_state_dict(free.state_dict())
    with torch.no_grad():
        # All tokens choose the first expert, whose capacity is 8 / 4.
        free.router.weight.zero_()[0] = 1.0
        cut.router.weight.copy_(free.router.weight)
        x = torch.rand(3, 8, 4)
        assert torch.allclose(cut(x)[:, :2], free(x)[:, :2], atol=1e-6)
        assert (cut(x)[:, 2:] == 0).all()
    assert cut.load is not None
    assert cut.load.tolist() == [12, 0, 0, 0, 36]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "as ZeRO gathers"])
def test_a_router_in_bfloat16_chooses_as_in_float32(weights: torch.dtype) -> None:
    torch.manual_seed(3)
    half = MixtureOfExperts(32, 8, 8).to(weights)
    whole = MixtureOfExperts(32, 8, 8)
    whole.load_state_dict(half.state_dict())
    x = torch.randn(16, 64, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        half(x)
    whole(x.float())
    assert half.load is not None
    assert whole.load is not None
    assert half.load.tolist() == whole.load.tolist()
    assert half.balance_loss is not None
    assert whole.balance_loss is not None
    assert half.balance_loss.dtype == torch.float32
    # In bfloat16 a loss of 1 has steps of 0.008.
    assert half.balance_loss.item() == pytest.approx(whole.balance_loss.item(), abs=1e-6)


RULES = {"capacity": {"capacity_factor": 0.5}, "dynamic": {"dynamic": True}}


@pytest.mark.slow
def test_ranks_drop_and_send_what_one_process_does(tmp_path: Path) -> None:
    cases = [
        Case(f"{rule} {name}", strategy, adam(block=Limited, rule=options), STEPS)
        for rule, options in RULES.items()
        for name, strategy in {
            "ep": plan("zero3", fsdp=4, ep=2, micro=1),
            "ep whole": plan("zero2", fsdp=4, ep=4),
            "tp": plan("zero2", fsdp=2, tp=2, sequence_parallel=False),
            "pp": plan("zero2", pp=2, fsdp=2),
            "checkpointed": plan("zero3", dp=2, fsdp=2, checkpointing="every"),
        }.items()
    ]
    for results in run_ranks(run_cases, 4, cases, tmp_path):
        for name, found in results.items():
            assert found["weights"] < 1e-10, (name, found)
            assert found["loss"] < 1e-10, (name, found)
            assert found["evaluated"] < 1e-5, (name, found)


@pytest.mark.slow
def test_a_step_tells_what_its_experts_got() -> None:
    model = {"block": Limited, "rule": RULES["capacity"]}
    # Of five examples one rank has two, and a filler beside, which is none.
    steps, strategies = {**STEPS, "batch_size": 5}, (plan(), plan("zero3", fsdp=2, ep=2))
    cases = [Case("c", strategy, adam(**model), steps) for strategy in strategies]
    alone = [report["experts"] for report in run_ranks(fit_and_report, 1, cases[0], 0.0)[0]]
    for reports in run_ranks(fit_and_report, 2, cases[1], 0.0):
        for report, expected in zip(reports, alone, strict=True):
            assert report["experts"] == pytest.approx(expected)
    assert all(0 < each["least"] < each["mean"] < each["most"] <= 0.125 + 1e-9 for each in alone)


def test_the_balance_of_experts_is_one_process_s_however_a_batch_is_shared_out(tmp_path: Path) -> None:
    strategies = {"ddp": plan("ddp", dp=2), "ep": plan("zero3", fsdp=2, ep=2, micro=1, checkpointing="every")}
    cases = [Case(name, strategy, Balanced(), STEPS) for name, strategy in strategies.items()]
    for results in run_ranks(run_cases, 2, cases, tmp_path):
        for name, found in results.items():
            assert found["weights"] < 1e-10, (name, found)
            assert found["loss"] < 1e-10, (name, found)


class OfAllTokens(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.ffn_norm(x).flatten(0, 1)).view_as(x)


def test_experts_are_planned_and_what_ranks_would_not_share_is_refused() -> None:
    small = {"layers": 2, "examples": 8, "length": 4}
    tasks = Balanced(**small), Language(**small), Balanced(block=OfAllTokens, **small)
    balanced, dense, mixed = (probe_model(task, task.data(Site("silo"))[0], device="cpu") for task in tasks)
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 6, "steps": 1}})

    def planned(probe: ModelProbe, devices: int, **strategy: object) -> Strategy:
        table = ClusterTable.model_validate({"strategy": strategy})
        return make_plan(probe, Resources(1, devices, 1 << 40, "cpu"), job, table).strategy

    assert planned(balanced, 2, ep=2, fsdp=2).mesh.ep == 2
    for probe, devices, options, said in [
        (balanced, 3, {"ep": 3}, "has 4 experts, which do not divide by 3"),
        (dense, 2, {"ep": 2}, "the model has no .*MixtureOfExperts"),
        (balanced, 2, {"pp": 2}, "the loss reads the model's parts"),
        (mixed, 2, {"data_parallel": "zero2"}, "the balance of experts over all tokens"),
    ]:
        with pytest.raises(ConfigError, match=said):
            planned(probe, devices, **options)


def test_rules_that_do_not_go_together_are_refused() -> None:
    for options, said in [
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0"),
        ({"dynamic": True, "capacity_factor": 1.25}, "give 1.5 or more"),
        ({"dynamic": True, "top_k": 4}, "no expert is left"),
        ({"top_k": 5}, "give 1 to 4"),
    ]:
        with pytest.raises(TaskError, match=said):
            MixtureOfExperts(4, 8, 4, **options)
    with pytest.raises(TaskError, match=r"\[8, 4\]"):
        MixtureOfExperts(4, 8, 4, dynamic=True)(torch.rand(8, 4))


@pytest.mark.slow
def test_a_plan_counts_on_the_tokens_that_a_capacity_lets_in() -> None:
    resources = Resources(1, 4, 1 << 40, "cpu")
    rates = rates_of(resources, "float32")
    strategy = Strategy(Mesh(fsdp=4, ep=2), "zero3", micro_batch=2)
    found = []
    for factor in (1.0, 2.0):
        task = Language(block=partial(Limited, capacity_factor=factor))
        probe = probe_model(task, task.data(Site("silo"))[0], device="cpu")
        assert set(probe.crowding.values()) == {factor}
        sums = UnitSums(probe)
        time = step_time(probe, sums, strategy, 8, rates, resources)
        whole = step_time(probe, sums, replace(strategy, mesh=Mesh(fsdp=4)), 8, rates, resources)
        sent, kept = sum(size for _, size in sums.expert_inputs), estimate(probe, strategy, 1).activations
        found.append((sent, time.computing, kept, whole.computing))
    (sent, computed, held, alone), (twice, longer, more, same) = found
    assert twice == 2 * sent
    assert longer > computed
    assert more > held
    assert same == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("kind", [Limited, Mixture])
def test_tokens_that_need_their_order_are_not_shared_out(kind: type[nn.Module]) -> None:
    task = Language(block=kind)
    data, _ = task.data(Site("silo"))
    probe = probe_model(task, data, device="cpu")
    table = ClusterTable.model_validate({"strategy": {"tp": 2, "sequence_parallel": True}})
    assert probe.tensor_parallel.no_sequence.startswith("its experts take") == (kind is Limited)
    if kind is Limited:
        with pytest.raises(ConfigError, match="its experts take an example's tokens in their order"):
            make_plan(probe, Resources(1, 2, 1 << 40, "cpu"), JobConfig.model_validate({"task": "t"}), table)
