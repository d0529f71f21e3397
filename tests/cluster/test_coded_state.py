"""An optimizer's state in 8 bits: its codes, what they change of training, and how a round goes on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_cases import Case, WithAdam, adam
from cluster_coded import against_float32, go_on
from cluster_models import Language, Mixture
from cluster_plans import plan
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ranks import run_ranks
from torch import Tensor, nn

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.choice import gradient_time
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.parallel.strategy import CODED_SHARE
from roundtable.cluster.plan.arithmetic import OperatorRecorder, PassWork
from roundtable.cluster.plan.memory_estimate import ModelProbe, estimate
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.replica_composition import check_replicas
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.stepping import coded_state
from roundtable.cluster.stepping.coded_state import CodedTensor, code_state, open_state, read_state
from roundtable.cluster.stepping.eight_bits import BLOCK, Levels, decode, encode, levels
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError, ResourceError
from roundtable.core.task import Site

JOB = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 4}})
SIZE: dict[str, Any] = {"dim": 64, "layers": 2, "heads": 4, "hidden": 256, "vocabulary": 256}
# The norm of what 8 bits change of a tensor, over that of its change in training.
BOUND = 0.05


def coded(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Levels]:
    table = Levels(values, signed=signed)
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scales = torch.empty(len(values) // BLOCK, dtype=values.dtype)
    encode(values, codes, scales, table)
    return codes, scales, table


def test_the_levels_are_the_papers() -> None:
    """Of bitsandbytes' and torchao's `create_dynamic_map`, whose levels are float32."""
    for signed, least, second, most in [
        (True, -0.99296874, -0.97890626, 0.99296874),
        (False, 0.0, 3.25e-7, 0.9964844),
    ]:
        found = levels(signed=signed)
        assert len(set(found)) == 256
        assert found[-1] == 1.0
        assert 0.0 in found
        assert [found[0], found[1], found[-2]] == pytest.approx([least, second, most], rel=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos_where_a_blocks_largest_value_is_positive(signed: bool) -> None:
    theirs = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
    assert list(levels(signed=signed)) == theirs.create_dynamic_map(signed=signed)
    values = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(1)) ** 3
    values = values if signed else values.abs()
    codes, scales, table = coded(values, signed=signed)
    scaled, theirs_scales = theirs.scale_tensor(values, BLOCK)
    expected = theirs.quantize_8bit_with_qmap(scaled, table.values).view(-1, BLOCK)
    if not signed:
        expected.clamp_(min=1)
    same = scales > 0
    assert int(same.sum()) > 0
    assert torch.equal(scales[same], theirs_scales[same])
    assert torch.equal(codes.view(-1, BLOCK)[same], expected[same])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_each_value_becomes_the_nearest_level_and_stays_there(
    seed: int, dtype: torch.dtype, signed: bool
) -> None:
    made = np.random.default_rng(seed)
    values = made.standard_normal(3 * BLOCK) * 10.0 ** made.uniform(-9, 3, 3 * BLOCK)
    values[BLOCK : 2 * BLOCK] *= made.choice([0.0, 1e-33, 1.0])
    values = values if signed else np.abs(values)
    given_values = torch.tensor(values, dtype=dtype)
    codes, scales, table = coded(given_values, signed=signed)
    found = decode(codes, scales, table)
    # A naive search for the nearest level, in float64.
    for block, scale, out in zip(
        given_values.double().view(-1, BLOCK).numpy(),
        scales.double().numpy(),
        found.double().view(-1, BLOCK).numpy(),
        strict=True,
    ):
        largest = block[np.abs(block).argmax()]
        assert scale == (largest if abs(largest) >= 1e-30 else 0.0)
        known = np.array(levels(signed=signed)) * scale
        distances = np.abs(block[:, None] - known)
        if not signed:
            # Of values without a sign only 0 becomes 0.
            distances[block > 0, 0] = np.inf
            assert not scale or not np.any(out[block > scale * 1e-38] == 0)
        nearest = distances.min(axis=1)
        assert np.all(np.abs(block - out) <= nearest + 1e-6 * abs(scale) if scale else out == 0)
    again, same, _ = coded(found, signed=signed)
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_finite(bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[300] = bad
    found = decode(*coded(values, signed=True))
    assert bool(found[:BLOCK].isfinite().all())
    assert not bool(found[300].isfinite())


def test_a_gpus_search_finds_the_same_levels() -> None:
    for signed in (True, False):
        values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(3)) ** 8
        values[::2] *= -1.0 if signed else 1.0
        table = Levels(values, signed=signed)
        looked_up = table.nearest(values)
        table._cells = None
        assert torch.equal(looked_up.int(), table.nearest(values))


def small(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any], *, eight: bool, opened: bool = False
) -> Any:
    """A few steps on parameters that take three portions; (weights, their start, optimizer)."""
    monkeypatch.setattr(coded_state, "CODED_PORTION", 50_000)
    made = torch.Generator().manual_seed(2)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=made)) for shape in [(100, 90), (40, 300), (77,), (65, 64)]
    ]
    goal = [torch.randn(each.shape, generator=made) for each in parameters]
    start = [each.detach().clone() for each in parameters]
    optimizer = kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 2e-3}], **options)
    if eight:
        code_state(optimizer)
    for number in range(30):
        for each, end in zip(parameters, goal, strict=True):
            noise = torch.randn(each.shape, generator=made)
            each.grad = (each.detach() - end) * torch.rand(each.shape, generator=made) ** 4 + 0.1 * noise
        # One gets no gradient at first.
        parameters[1].grad = None if number == 0 else parameters[1].grad
        optimizer.step()
        if opened and number % 3 == 0:
            open_state(optimizer)
    return parameters, start, optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_weights_stay_near_those_of_float32(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    plain, start, whole = small(monkeypatch, kind, options, eight=False)
    near, _, optimizer = small(monkeypatch, kind, options, eight=True)
    for one, other, first in zip(plain, near, start, strict=True):
        assert float((one - other).norm() / (one - first).norm()) < 0.05
    small_state = optimizer.state[near[2]]
    assert not any(isinstance(value, CodedTensor) for value in small_state.values())
    assert torch.equal(near[2], plain[2])
    for parameter, reference in [(near[0], plain[0]), (near[1], plain[1]), (near[3], plain[3])]:
        for key, value in optimizer.state[parameter].items():
            if torch.as_tensor(whole.state[reference][key]).dim():
                assert isinstance(value, CodedTensor), key
                read = read_state(value)
                assert read.shape == parameter.shape
                assert (
                    float((read - whole.state[reference][key]).norm() / whole.state[reference][key].norm())
                    < 0.1
                )


def test_reading_and_loading_state_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"lr": 1e-3, "fused": True}
    one, _, _ = small(monkeypatch, torch.optim.AdamW, options, eight=True)
    other, _, optimizer = small(monkeypatch, torch.optim.AdamW, options, eight=True, opened=True)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # A step that the device calls off moves neither weights nor state.
    kept = {
        (p, key): read_state(value).clone()
        for p, each in optimizer.state.items()
        for key, value in each.items()
    }
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(value, read_state(optimizer.state[p][key])) for (p, key), value in kept.items())


def eight_bits(name: str, kind: str, micro: int = 2, task: Any = None, **options: Any) -> Case:
    strategy = plan(kind, micro, optimizer_bits=8, **options)
    return Case(name, strategy, task or adam(**SIZE), {"steps": 6, "batch_size": 8, "max_gradient_norm": 0.5})


TWO = [
    eight_bits("ddp", "ddp", dp=2),
    eight_bits("zero1", "zero1", dp=2),
    eight_bits("zero2", "zero2", fsdp=2),
    eight_bits("zero3", "zero3", fsdp=2),
    eight_bits("tp", "none", tp=2),
    eight_bits("1f1b", "none", pp=2),
    eight_bits("tp sequence", "none", tp=2, sequence_parallel=True),
    eight_bits("interleaved", "none", pp=2, schedule="interleaved", virtual_stages=2),
    eight_bits("zero3 checkpointed", "zero3", fsdp=2, checkpointing="every"),
    eight_bits("zero3 accumulated", "zero3", micro=1, fsdp=2),
    eight_bits("ddp int8", "ddp", dp=2, reduction="int8"),
    eight_bits("local", "ddp", dp=2, local_steps=3),
    eight_bits("ep", "zero3", fsdp=2, ep=2, task=adam(block=Mixture, **SIZE)),
    eight_bits("float16", "zero3", fsdp=2, precision="float16", task=WithAdam(**SIZE)),
    eight_bits("bfloat16", "ddp", dp=2, precision="bfloat16", task=WithAdam(**SIZE)),
]
FOUR = [
    eight_bits("hsdp", "zero3", dp=2, fsdp=2),
    eight_bits("zero3 tp", "zero3", fsdp=2, tp=2),
    eight_bits("pp zero2", "zero2", pp=2, fsdp=2),
    eight_bits("pp tp", "none", pp=2, tp=2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)], ids=["two ranks", "four ranks"])
def test_strategies_stay_near_float32(world: int, cases: list[Case]) -> None:
    for found in run_ranks(against_float32, world, cases):
        assert len(found) == len(cases)
        for name, one in found.items():
            assert one["coded"] > 0.6, (name, one)
            assert 0.0 < one["far"] < BOUND, (name, one)


def test_a_round_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    cases = {each.name: each for each in TWO}
    after = [
        cases["zero3"],
        cases["ddp"],
        replace(cases["zero3"], name="plain", strategy=plan("zero3", fsdp=2)),
    ]
    for found in run_ranks(go_on, 2, cases["zero3"], after, tmp_path):
        # Other blocks round again; a plan without codes takes the same state.
        assert found["zero3"] == 0.0
        assert 0.0 < found["ddp"] < BOUND
        assert 0.0 < found["plain"] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "tp", "1f1b"])
def test_so_it_does_under_every_strategy(name: str, tmp_path: Path) -> None:
    cases = {each.name: each for each in TWO}
    for found in run_ranks(go_on, 2, cases[name], [cases[name]], tmp_path):
        assert found[name] == 0.0


def test_a_word_that_is_not_in_the_batch_does_not_jump() -> None:
    """Its second moment is far below those of others in its block; its gradient is 0 after the first step."""
    found = []
    for eight in (False, True):
        table = nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.AdamW([table], lr=1e-3)
        if eight:
            code_state(optimizer)
        for number in range(3):
            table.grad = torch.full_like(table, 1.0)
            table.grad[::2] = 1e-4 if number == 0 else 0.0
            optimizer.step()
        found.append(table.detach()[::2].abs().max())
    assert found[1] <= 1.01 * found[0]


@cache
def looked_over() -> ModelProbe:
    task = adam(dim=512, layers=3, heads=4, hidden=2048, length=16)
    return probe_model(task, task.data(Site("silo"))[0], device="cuda")


def planned(probe: ModelProbe, job: JobConfig = JOB, memory: int = 1 << 36, **hand: Any) -> Any:
    table = ClusterTable.model_validate({"precision": "float32", "strategy": hand})
    return make_plan(probe, Resources(1, 1, memory, "cuda", host_memory=1 << 36), job, table)


def test_a_plan_says_what_it_saves_and_costs() -> None:
    probe, strategy = looked_over(), plan("ddp", micro=4, dp=2)
    needed, less = (estimate(probe, replace(strategy, optimizer_bits=bits), 1) for bits in (32, 8))
    assert less.optimizer == pytest.approx(needed.optimizer * CODED_SHARE, abs=2)
    assert 0.5 * needed.optimizer < needed.peak - less.peak < 1.5 * needed.optimizer
    whole, chosen = planned(probe), planned(probe, optimizer_bits=8)
    assert whole.strategy.optimizer_bits == 32
    assert chosen.strategy.optimizer_bits == 8
    assert "optimizer in 8 bits" in str(chosen.strategy)
    for each, used in [(whole, False), (chosen, True)]:
        saved = next(one for one in each.savings if one.optimisation == "the optimizer in 8 bits")
        assert saved.used == used
        assert min(saved.saves, saved.costs) > 0
    assert chosen.time.optimizer > whole.time.optimizer
    # Where it is too little, nothing else waits in the host's memory beside it.
    with pytest.raises(ResourceError, match="in 8 bits"):
        planned(probe, memory=1 << 25, optimizer_bits=8)


def test_bytes_that_coding_moves_are_counted() -> None:
    """On a CPU; what a GPU takes follows from its search for levels, and was measured."""
    values = torch.randn(1 << 20)
    table = Levels(values, signed=True)
    codes, scales = torch.empty(1 << 20, dtype=torch.uint8), torch.empty(1 << 12)
    recorder = OperatorRecorder(nn.Module())
    with recorder:
        encode(values, codes, scales, table)
        decode(codes, scales, table)
    work = sum(recorder.found(1)[0].values(), PassWork())
    moved = (work.moved + work.carried) / values.nbytes
    assert moved == pytest.approx(gradient_time._CODED[False], rel=0.01)


def test_what_has_no_8_bits_is_refused_before_a_round() -> None:
    class Plain(Language):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adagrad(parameters)

    task = Plain()
    data, _ = task.data(Site("silo"))
    with pytest.raises(ConfigError, match=r"optimizer_bits = 8: the task's optimizer is Adagrad.*AdamW"):
        planned(probe_model(task, data, device="cuda"), optimizer_bits=8)
    sgd = probe_model(Language(), data, device="cuda")
    with pytest.raises(ConfigError, match=r"optimizer_bits = 8: the optimizer keeps no state"):
        planned(sgd, optimizer_bits=8)
    momentum = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 4, "momentum": 0.9}})
    assert planned(sgd, momentum, optimizer_bits=8).strategy.optimizer_bits == 8
    for other in ("offload", "offload_optimizer"):
        with pytest.raises(ConfigError, match="only one is needed"):
            plan("zero3", fsdp=2, optimizer_bits=8, **{other: True})
        with pytest.raises(ValidationError, match="leave out one of the two"):
            ClusterTable.model_validate({"strategy": {"optimizer_bits": 8, other: True}})
    private = JobConfig.model_validate(
        {
            "task": "t",
            "algorithm": {"batch_size": 4},
            "privacy": {"level": "example", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        }
    )
    with pytest.raises(PrivacyError, match=r"optimizer_bits = 8.*not tried"):
        planned(looked_over(), private, optimizer_bits=8)
    with pytest.raises(ConfigError, match=r"elastic.*optimizer_bits = 8"):
        check_replicas(task, JOB, data, "float32", 8)
