"""Whether nodes train apart: by what was measured of links and devices, and never against what is set."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cluster_cases import WithAdam

from roundtable.client.policy.cluster_table import ClusterTable, parse_bytes
from roundtable.cluster.choice.planner import ClusterPlan, make_plan
from roundtable.cluster.parallel.strategy import Mesh
from roundtable.cluster.plan.diloco_plan import costs
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.task import Site

TASK = WithAdam(dim=128, layers=4, heads=4, hidden=512, vocabulary=2000, length=64)
# A step of 8 examples on four devices that do 1e9 products a second takes FLOPS / 250e6 s.
BATCH, PRODUCTS = 8, 1e9
FLOPS = 1e8
COMPUTING = FLOPS * BATCH / (4 * PRODUCTS * 0.5)


@cache
def small() -> ModelProbe:
    """The model, looked over once, by the first test that asks."""
    return probe_model(TASK, TASK.data(Site("silo"))[0], device="cpu")


def found_model() -> ModelProbe:
    return replace(small(), work=replace(small().work, flops=FLOPS))


def size() -> int:
    """The weights in bytes."""
    return sum(weight.elements * weight.itemsize for weight in small().anatomy.weights)


def links(ratio: float, **changes: Any) -> Links:
    """Between two nodes of two devices reducing the gradients takes so many times the computation."""
    between = size() / 2 / (ratio * COMPUTING)
    made = Links(
        "k", 4, 0.0, {1 << 24: 1e12}, {1 << 16: between / 9, 1 << 24: between}, {"float32": PRODUCTS}
    )
    return replace(made, **changes)


NONE = {"level": "none"}
EXAMPLES = {"level": "example", "clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}


def planned(
    found: Links | None,
    algorithm: dict[str, Any] | None = None,
    resources: Resources | None = None,
    privacy: dict[str, Any] | None = None,
    shares: str = "equal",
    **hand: Any,
) -> ClusterPlan:
    table = ClusterTable.model_validate({"strategy": hand, "shares": shares})
    values = {
        "task": "t",
        "algorithm": {"batch_size": BATCH, **(algorithm or {})},
        "privacy": privacy or {"level": "none"},
    }
    there = resources or Resources(2, 2, parse_bytes("2GiB"), "cpu")
    return make_plan(found_model(), there, JobConfig.model_validate(values), table, found)


def test_the_model_s_operations_and_gradients_make_the_figures() -> None:
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": BATCH}})
    found = costs(found_model(), Resources(2, 2, 1, "cpu"), job, links(7.0), "float32")
    assert found is not None
    assert found.computing == pytest.approx(COMPUTING)
    assert found.reducing == pytest.approx(7.0 * COMPUTING)
    # Six operations for each weight of a product and each of 64 tokens, more or less.
    assert 0.5 < small().flops / (6 * 64 * small().anatomy.elements) < 1.5


@pytest.mark.parametrize(("ratio", "steps"), [(3.9, 0), (4.1, 41), (20.0, 200), (1000.0, 500)])
def test_nodes_train_apart_where_reducing_dominates(ratio: float, steps: int) -> None:
    plan = planned(links(ratio))
    assert plan.strategy.local_steps == steps
    assert plan.strategy.mesh == (Mesh(dp=2, fsdp=2) if steps else Mesh(dp=4))
    assert plan.strategy.data_parallel == ("zero2" if steps else "ddp")
    said = [reason for reason in plan.reasons if "meet every" in reason and "forbids it" in reason]
    assert len(said) == bool(steps)
    assert not steps or f"meet every {steps} steps" in str(plan.strategy)


def test_a_small_model_s_gradients_are_reduced_though_they_dominate() -> None:
    fast = links(50.0)
    between = {size: rate * 1e6 for size, rate in fast.between.items()}
    small = replace(fast, between=between, products={"float32": PRODUCTS * 1e6})
    assert planned(small).strategy.local_steps == 0


def test_one_device_on_each_node_is_a_replica() -> None:
    plan = planned(links(50.0), resources=Resources(4, 1, parse_bytes("2GiB"), "cpu"))
    assert (plan.strategy.mesh, plan.strategy.data_parallel) == (Mesh(dp=4), "ddp")
    assert plan.strategy.local_steps > 0


@pytest.mark.parametrize(
    ("algorithm", "outer"),
    [
        ({"steps": 5000}, (0.7, 0.9)),
        ({"steps": 900}, (1.0, 0.0)),
        ({"epochs": 3}, (1.0, 0.0)),
        ({"optimizer_state": "keep"}, (0.7, 0.9)),
    ],
)
def test_momentum_needs_meetings(algorithm: dict[str, Any], outer: tuple[float, float]) -> None:
    strategy = planned(links(10.0), algorithm).strategy
    assert (strategy.local_steps, strategy.outer_learning_rate, strategy.outer_momentum) == (100, *outer)


def test_what_is_set_by_hand_stays() -> None:
    assert planned(links(50.0), local_steps=0).strategy.local_steps == 0
    mine = planned(links(50.0), outer_learning_rate=0.5, outer_momentum=0.8, micro_batch=1, tp=2).strategy
    assert (mine.outer_learning_rate, mine.outer_momentum, mine.micro_batch, mine.mesh.tp) == (0.5, 0.8, 1, 2)
    assert mine.local_steps == 500
    set_to = planned(None, local_steps=7, data_parallel="ddp").strategy
    assert (set_to.local_steps, set_to.outer_learning_rate, set_to.outer_momentum) == (7, 1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dp": 4}, "dp = 4 is set, and each of 2 nodes"),
        ({"pp": 2}, "pp = 2 is set"),
        ({"reduction": "powersgd"}, "reduction = powersgd is set"),
        ({"shares": "measured"}, "replicas that train apart count alike"),
        ({"data_parallel": "zero1"}, "share one optimizer's state out"),
        ({"algorithm": {"batch_size": 1}}, "no example for each of 2 nodes"),
    ],
)
def test_what_does_not_go_with_it_is_said(arguments: dict[str, Any], said: str) -> None:
    plan = planned(links(50.0 * BATCH), **arguments)
    assert plan.strategy.local_steps == 0
    assert any("nodes cannot train apart" in reason and said in reason for reason in plan.reasons)


def test_nothing_is_chosen_without_figures_or_in_private_steps() -> None:
    unknown: list[Links | None] = [None, links(50.0, products={}), links(50.0, between={})]
    assert [planned(found).strategy.local_steps for found in unknown] == [0, 0, 0]
    one = Resources(1, 4, parse_bytes("2GiB"), "cpu")
    assert planned(links(50.0), resources=one).strategy.local_steps == 0
    assert planned(links(50.0), privacy=EXAMPLES).strategy.local_steps == 0


def test_a_model_that_no_node_holds_is_spread_over_all() -> None:
    small = Resources(2, 2, parse_bytes("20MiB"), "cpu")
    plan = planned(links(50.0), resources=small)
    assert plan.strategy.local_steps == 0
    assert any("meet every" in reason and "does not fit" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("hand", "said"),
    [
        ({"data_parallel": "zero1"}, "share one optimizer's state out"),
        ({"data_parallel": "ddp", "reduction": "sign"}, "reduce no gradients"),
        ({"data_parallel": "zero2", "offload": True}, "meet over the devices' network"),
    ],
)
def test_hands_that_contradict_each_other_are_refused(hand: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(None, local_steps=5, **hand)


def test_replicas_that_would_never_have_an_example_are_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of 3 has no example for each of the 4 replicas of dp"):
        planned(None, {"batch_size": 3}, data_parallel="ddp", dp=4, local_steps=5)


def test_the_weights_that_replicas_part_from_take_memory() -> None:
    def optimizer(**hand: Any) -> int:
        return planned(None, dp=4, data_parallel="ddp", **hand).estimate.optimizer

    assert optimizer(local_steps=5) - optimizer() == size()
    assert optimizer(local_steps=5, outer_momentum=0.9) - optimizer() == 2 * size()
