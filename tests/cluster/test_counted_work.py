"""What predicted seconds are made of, held against what real passes and real steps on ranks do."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from cluster_models import Language
from cluster_plans import case, plan
from counted_collectives import STEPS, collectives_of, split_and_recorded
from ranks import run_ranks
from torch.nn import functional as F

from roundtable.cluster.choice import host_time
from roundtable.cluster.choice.collective_time import Wires
from roundtable.cluster.choice.gradient_time import GradientTraffic
from roundtable.cluster.choice.host_time import step_calls
from roundtable.cluster.choice.machine_rates import MachineRates, bandwidth, rates_of
from roundtable.cluster.choice.step_time import step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.plan import split_rates
from roundtable.cluster.plan.arithmetic import OperatorRecorder, PassWork, count_work
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.model_probe import example_batch, probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.core.task import Site, initial_state

BATCH, RATE = 8, 1e9
TWO = Resources(1, 2, 1 << 34, "cpu")
# Every byte takes as long, and nothing else takes time.
BYTES = replace(rates_of(TWO, "float32"), within={1: RATE}, copies=math.inf)


@cache
def looked_over() -> ModelProbe:
    """The model of the cases below."""
    task = case("any", plan(), layers=2).task
    return probe_model(task, task.data(Site("silo"))[0], device="cpu")


def attended(length: int, *, causal: bool) -> tuple[PassWork, PassWork]:
    """What is counted of the two passes of one fused attention: two examples, three heads of width 8."""
    q, k, v = (torch.ones(2, 3, length, 8, requires_grad=True) for _ in "qkv")
    recorder = OperatorRecorder(torch.nn.Module())
    with recorder:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        recorder.backward = True
        out.sum().backward()
    forward, backward = recorder.found(1)
    return forward[""], backward


@pytest.mark.parametrize(("length", "share"), [(60, 1.0), (512, 1.0), (1024, 0.75)])
def test_attention_counts_the_blocks_that_its_kernel_visits(length: int, share: float) -> None:
    """Keys come in blocks of 512: of n such blocks each query block sees those up to its own, (n + 1)/2n."""
    pairs = 6 * length**2
    for causal, visits in ((False, 1.0), (True, share)):
        forward, backward = attended(length, causal=causal)
        assert forward.flops == forward.attention == 4 * 8 * pairs
        assert (forward.scores, forward.visited) == (visits * pairs, visits * forward.flops)
        # Two products forward and four back in the model, and five in the kernel.
        assert backward.attention == 2 * forward.attention
        assert (backward.scores, backward.visited) == (2 * forward.scores, 2.5 * forward.visited)


def test_a_real_pass_does_what_was_counted_on_fake_tensors() -> None:
    task = Language(dim=32, hidden=64, layers=2, vocabulary=64, length=16)
    batch = example_batch(task.data(Site("silo"))[0], 3)
    model: Any = initial_state(task, 0)
    recorder = OperatorRecorder(model)
    with recorder:
        loss = task.loss(model, batch)
        recorder.backward = True
        loss.backward()
    forward, backward = recorder.found(3)
    counted = count_work(task, batch)
    assert (dict(counted.forward), counted.backward) == (forward, backward)
    whole = sum(forward.values(), PassWork())
    assert min(*whole.values) > 0
    # Residual sums of two blocks, each of two activations that become a third, are the least that is carried.
    assert whole.carried >= 2 * 2 * 3 * 16 * 32 * 4


def test_time_goes_where_it_was_measured() -> None:
    """Each figure of a rank moves the computing by what was counted of its work, and by nothing else."""
    probe = looked_over()
    sums = UnitSums(probe)
    measured = Links(
        "k", 1, 0.0, {}, {}, {"float32": 1e10}, memory=1e10, operators=1e9, call=1e-5, copies=5e9,
        attention=2e10, score=1e-9,
    )  # fmt: skip
    alone = Resources(1, 1, 1 << 34, "cpu")

    def computing(links: Links) -> float:
        rates = rates_of(alone, "float32", links)
        return step_time(probe, sums, Strategy(Mesh(), "none", BATCH), BATCH, rates, alone).computing

    total = sum(probe.work.forward.values(), probe.work.backward)
    whole = computing(measured)
    for name, work in (
        ("attention", total.visited * BATCH),
        ("operators", total.moved * BATCH),
        ("copies", total.carried * BATCH),
    ):
        rate = getattr(measured, name)
        slower = computing(replace(measured, **{name: rate / 3}))
        assert slower - whole == pytest.approx(2 * work / rate)
    slower = computing(replace(measured, score=3e-9))
    assert slower - whole == pytest.approx(2e-9 * total.scores * BATCH)
    products = (total.flops - total.attention) * BATCH
    slower = computing(replace(measured, products={"float32": 1e10 / 3}))
    assert slower - whole == pytest.approx(2e-10 * products)


def test_collectives_of_a_step_are_those_that_are_predicted() -> None:
    """Calls and bytes of each kind, of two ranks' steps and of the prediction."""
    plans = {
        "zero1": plan("zero1", dp=2),
        "zero2": plan("zero2", fsdp=2),
        "zero3": plan("zero3", fsdp=2),
        "tensor": plan("none", BATCH, tp=2),
        "sequence": plan("none", BATCH, tp=2, sequence_parallel=True),
    }
    cases = [case(name, strategy, {"steps": STEPS}, layers=2) for name, strategy in plans.items()]
    issued = dict(zip(plans, run_ranks(collectives_of, 2, cases)[0], strict=True))
    probe = looked_over()
    sums = UnitSums(probe)

    def step(name: str, kind: str) -> tuple[float, float]:
        sizes = issued[name].get(kind, [])
        return len(sizes) / STEPS, sum(sizes) / STEPS

    for name, strategy in list(plans.items())[:3]:
        wires = Wires(BYTES, TWO, strategy.mesh, gloo=True)
        count = BATCH // 2 // strategy.micro_batch
        traffic = GradientTraffic(sums, strategy, wires, probe.anatomy.blocks, count)
        weights, groups = traffic.weights, traffic.groups
        if name == "zero1":
            assert step(name, "broadcast_") == (weights.count, weights.trained)
            continue
        gathers, reductions = traffic.gathers, traffic.reductions
        assert step(name, "_allgather_base_") == (gathers * groups, gathers * weights.bytes)
        assert step(name, "_reduce_scatter_base_") == (reductions * groups, reductions * weights.trained)
    # A half of what is gathered passes each link, and of what is summed a half twice. The model is in float64
    # and its head's part is noted before it is gathered.
    seconds = step_time(probe, sums, plans["tensor"], BATCH, BYTES, TWO).tensor
    summed, gathered = step("tensor", "all_reduce")[1], step("tensor", "all_gather_into_tensor")[1]
    assert seconds * RATE == pytest.approx((summed + gathered) / 2)
    # Each kind by itself; a shard of what is gathered is noted, and twice what is scattered to a rank.
    for kind, name, noted in (
        ("all_reduce", "all_reduce", 2),
        ("all_gather", "all_gather_into_tensor", 2),
        ("reduce_scatter", "reduce_scatter_tensor", 4),
    ):
        tables = {
            each: {1: RATE if each == kind else math.inf} for each in (kind, "reduce_scatter", "all_gather")
        }
        alone = replace(
            BYTES, kinds={"within": tables}, within={1: RATE if kind == "all_reduce" else math.inf}
        )
        seconds = step_time(probe, sums, plans["sequence"], BATCH, alone, TWO).tensor
        assert seconds * RATE == pytest.approx(step("sequence", name)[1] / noted), kind
    # What is summed is copied, what is gathered and scattered along the sequence put into order.
    copying = replace(BYTES, within={1: math.inf}, copies=RATE)
    for name in ("tensor", "sequence"):
        copied = step(name, "all_reduce")[1]
        copied += sum(step("sequence", each)[1] - step("tensor", each)[1] for each in ("cat", "clone")) * (
            name == "sequence"
        )
        seconds = step_time(probe, sums, plans[name], BATCH, copying, TWO).tensor
        assert seconds * RATE == pytest.approx(2 * copied / 2), name


def test_what_split_layers_take_beside_is_measured_without_their_collectives() -> None:
    names = {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor"}
    names["reduce_scatter"] = "reduce_scatter_tensor"
    for found, alone, counts in run_ranks(split_and_recorded, 2):
        assert sorted(found) == ["layer", "layer again", "sequence", "sequence again"]
        assert found["layer"] > 0
        assert alone == {}
        for key, expected in split_rates._COLLECTIVES.items():
            issued = {kind: counts[key].get(name, 0) for kind, name in names.items()}
            assert issued == {kind: expected.get(kind, 0) for kind in names}, key


def test_the_hosts_share_of_split_layers_is_what_was_measured() -> None:
    probe, sums = looked_over(), UnitSums(looked_over())
    for name, sequence in (("layer", False), ("sequence", True)):
        strategy = plan("none", BATCH, tp=2, sequence_parallel=sequence)
        layers = sums.split_layers(list(probe.anatomy.units), rest=True, sequence=sequence)
        none, some = (replace(BYTES, split={name: value, f"{name} again": 9.0}) for value in (0.0, 1e-3))
        before, after = (step_time(probe, sums, strategy, BATCH, rates, TWO).host for rates in (none, some))
        assert after - before == pytest.approx(1e-3 * layers)
        assert layers > 0


def test_a_pipeline_adds_up_the_gradients_of_its_micro_batches() -> None:
    """A call for each parameter and each micro-batch after the first one."""
    probe, sums = looked_over(), UnitSums(looked_over())
    strategy = plan("none", 1, pp=2)
    units = probe.anatomy.blocks[:1]
    wires = Wires(BYTES, TWO, strategy.mesh, gloo=True)
    two, three = (
        step_calls(sums, strategy, units, GradientTraffic(sums, strategy, wires, units, count))
        for count in (2, 3)
    )
    assert three - two == host_time._STAGE + sums.weights(strategy, units).count


def with_kinds(**kinds: dict[int, float]) -> MachineRates:
    return replace(BYTES, within={1 << 16: 1e9, 1 << 20: 2e9}, kinds={"within": kinds})


def test_a_collective_takes_the_time_that_was_measured_of_its_kind() -> None:
    table = {1 << 16: 3e9, 1 << 20: 6e9}
    mesh = Mesh(fsdp=2)
    wires = Wires(with_kinds(all_gather=table, reduce_scatter=table, send=table), TWO, mesh, gloo=True)
    plain = Wires(with_kinds(), TWO, mesh, gloo=True)
    for size, pieces in product((1 << 16, 1 << 20), (1, 2)):
        gather = plain.all_gather("fsdp", pieces * size, pieces) / 3
        assert wires.all_gather("fsdp", pieces * size, pieces) == pytest.approx(gather)
        # gloo's sums of all on every rank are in what was measured.
        assert wires.reduce_scatter("fsdp", pieces * size, pieces) == pytest.approx(gather)
        assert plain.reduce_scatter("fsdp", pieces * size, pieces) == pytest.approx(6 * gather)
        assert wires.all_reduce("fsdp", size) == plain.all_reduce("fsdp", size)
    both = Wires(with_kinds(broadcast=table), TWO, Mesh(dp=2), gloo=True)
    assert both.broadcast("dp", 4 << 16, 4) == pytest.approx(4 * (1 << 16) / 3e9)


def test_between_measured_payloads_time_is_on_a_line() -> None:
    """Of a link with 100 µs before the first byte and 1 GB/s after it every payload's time comes out."""
    table = {size: size / (1e-4 + size / 1e9) for size in (1 << 16, 1 << 20, 1 << 24)}
    for size in (1 << 16, 100_000, 1 << 18, 1 << 20, 5_000_000, 1 << 24):
        assert size / bandwidth(table, size) == pytest.approx(1e-4 + size / 1e9)
    assert 1 / bandwidth(table, 1) == pytest.approx(1e-4 + (1 << 16) / 1e9)
